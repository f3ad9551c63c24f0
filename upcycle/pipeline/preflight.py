"""Everything that a run relies on, checked before it starts."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import scratch_folder
from upcycle.data.documents import packaged_text, read_documents
from upcycle.errors import UpcycleError
from upcycle.models.loading import class_config, load_model, load_tokenizer
from upcycle.pipeline.shared import Run
from upcycle.pipeline.stages import preconditions
from upcycle.recipe.loading import load_recipe
from upcycle.recipe.schema import Recipe
from upcycle.training.models import check_isolation, packing_leak

_PROBE = "def main():\n    return 'naïve café', 0x1F, \"→\"\n"
_STATE_BYTES = 12  # an fp32 master and two fp32 moments for each parameter


@dataclass(frozen=True)
class PreflightCheck:
    """One finding.

    Attributes:
        name: what was looked at.
        passed: whether a run can rely on it.
        detail: the values seen, and what to do where it failed.
    """

    name: str
    passed: bool
    detail: str


def preflight(
    recipe_file: Path | None = None, overrides: Sequence[str] = ()
) -> Iterator[PreflightCheck]:
    """Check the installation and, with a recipe, its run; each finding as it is made."""
    yield _check("versions", _versions)
    yield _check("device", _device)
    yield _check("packaged texts", _packaged_texts)
    if recipe_file is None:
        return
    try:
        recipe = load_recipe(recipe_file, overrides)
        checkpoint = Checkpoint.open(recipe.source)
    except UpcycleError as error:
        yield PreflightCheck("recipe and source", False, _one_line(error))
        return
    yield PreflightCheck("recipe and source", True, f"{recipe_file}, {checkpoint.folder}")
    asked = Run(recipe, checkpoint.folder, inputs=(recipe_file,), strict=True)
    for precondition in preconditions(asked):
        yield _check(precondition.name, precondition.look)
    yield _check("tokenizer", lambda: _tokenizer(checkpoint))
    yield _check("generation config", lambda: _generation_config(checkpoint))
    yield _check("disk space", lambda: _disk_space(checkpoint, recipe))
    if recipe.train is not None:
        yield _check("packed rows", lambda: _isolation(checkpoint))


class _FailedError(Exception):
    """A check's own verdict."""


def _check(name: str, look: Callable[[], str]) -> PreflightCheck:
    try:
        return PreflightCheck(name, True, look())
    except _FailedError as failed:
        return PreflightCheck(name, False, str(failed))
    except UpcycleError as error:
        return PreflightCheck(name, False, _one_line(error))


def _one_line(error: UpcycleError) -> str:
    return f"{error.what} ({error.where}); {error.fix}"


def _versions() -> str:
    """Installed versions against what the package asks for."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("upcycle") or []]
    except metadata.PackageNotFoundError:
        return "upcycle is not installed but runs from its sources: requirements unknown"
    found, wrong = [], []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    if wrong:
        raise _FailedError("; ".join(wrong) + "; install with -c constraints.txt")
    return ", ".join(found)


def _device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if torch.backends.mps.is_available():
        return "Apple GPU"
    return f"CPU, {torch.get_num_threads()} threads"


def _packaged_texts() -> str:
    counts = {
        name: sum(1 for _ in read_documents([packaged_text(name)]))
        for name in ("heldout", "calibration")
    }
    return ", ".join(f"{name} {count} documents" for name, count in counts.items())


def _tokenizer(checkpoint: Checkpoint) -> str:
    """Ids fit the embedding, and plain text survives a round trip."""
    tokenizer = load_tokenizer(checkpoint.folder)
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if back.strip() != _PROBE.strip():
        raise _FailedError(f"{_PROBE!r} comes back as {back!r}: not the text that is trained on")
    rows = class_config(checkpoint.config).get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise _FailedError(
            f"ids reach {largest}, the model embeds {rows}: resize its embedding first"
        )
    return f"round trip exact, ids up to {largest} of {rows}"


def _generation_config(checkpoint: Checkpoint) -> str:
    """An invalid one is kept byte for byte here, but breaks save_pretrained() later."""
    from transformers import GenerationConfig

    if not (checkpoint.folder / "generation_config.json").is_file():
        return "none"
    try:
        config = GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        config.validate(strict=True)
        with scratch_folder() as folder:
            config.save_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _FailedError(f"save_pretrained() would refuse it: {reason}") from error
    return "valid"


def _disk_space(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """Converted and uptrained weights, and the training states at their most numerous."""
    needed = 2 * checkpoint.weight_bytes
    if recipe.train is not None:
        needed += (recipe.train.keep_last + 1) * _STATE_BYTES * checkpoint.num_parameters
    folder = recipe.output
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{needed / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free at {folder}"
    if free < needed:
        raise _FailedError(f"{detail}; choose another output")
    return detail


def _isolation(checkpoint: Checkpoint) -> str:
    model = load_model(checkpoint.folder, dtype=torch.float32)
    check_isolation(model)
    return f"documents are isolated (logits move by {packing_leak(model):.0e} of their spread)"
