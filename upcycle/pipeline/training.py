"""The `train` section of a recipe: what it goes on from, and what it is refused for.

`upcycle train` and `upcycle run` share it, and know each other's results by it.
"""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from upcycle.checkpoint.lineage import (
    CONVERT,
    TRAIN,
    is_of_model,
    is_vocabulary,
    not_of_origin,
    origin_of,
    other_files,
)
from upcycle.checkpoint.manifest import MANIFEST_NAME, Manifest, hash_file, read_manifest
from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.conversion.calibration import check_options
from upcycle.errors import TrainingError
from upcycle.families import shape_of
from upcycle.models.loading import load_tokenizer
from upcycle.options.convert import ConvertOptions
from upcycle.pipeline.convert_stage import option_changes
from upcycle.progress import Watcher
from upcycle.recipe.schema import Layout, Recipe
from upcycle.training.facts import weight_hashes
from upcycle.training.team import Team, team

if TYPE_CHECKING:
    from upcycle.training.result import TrainResult

_JOIN = "train"  # the word at which all processes begin to train


class Manner(TypedDict, total=False):
    """How to train, beside what: arguments of `uptrain`, which tells of them."""

    resume: bool
    allow_change: Collection[str]
    overwrite: bool
    watch: Watcher
    tell: Callable[[str], None]
    command: Sequence[str]


def train(recipe: Recipe, **manner: Unpack[Manner]) -> "TrainResult | None":
    """Uptrain the converted folder of a recipe, on all processes that were started together.

    Returns:
        What the run did; None on a process whose first one ended before it.

    Raises:
        TrainingError: the converted folder is missing, or is not what the recipe makes of its
            source; or as for `uptrain`.
        UpcycleError: as for `uptrain`.
    """
    crew, notes = team(), []
    if crew is None or crew.is_first:
        notes = check_converted(recipe)
    elif crew.wait() is None:
        return None
    result = start(recipe, **manner)
    return replace(result, notes=(*notes, *result.notes))


def start(recipe: Recipe, **manner: Unpack[Manner]) -> "TrainResult":
    """Train a recipe's converted folder, after all checks; the first process calls the others.

    Raises:
        UpcycleError: as for `uptrain`.
    """
    from upcycle.training.loop import uptrain

    assert recipe.train is not None
    crew = team()
    if crew is not None and crew.is_first:
        crew.tell(_JOIN)
    layout, teacher = Layout(recipe), teacher_of(recipe)
    return uptrain(
        layout.converted, teacher, recipe.train, layout.uptrained, layout.training, **manner
    )


def join(recipe: Recipe, crew: Team) -> None:
    """Train whenever the first process begins to, until it ends; the other processes do.

    Raises:
        UpcycleError: as for `uptrain`.
    """
    while crew.wait() is not None:
        start(recipe, resume=True, overwrite=True)


def teacher_of(recipe: Recipe) -> Path:
    """The folder of the model to learn from: the source, unless another one is named."""
    named = None if recipe.train is None else recipe.train.teacher
    return resolve(recipe.source if named is None else named)


def check_teacher(recipe: Recipe) -> str:
    """Refuse a teacher that the recipe names and that reads other tokens than the source.

    Raises:
        CheckpointError: it is missing or damaged.
        EvaluationError: its tokenizer is not the source's.
    """
    from upcycle.models.comparable import check_same_tokenizer

    folder = Checkpoint.open(teacher_of(recipe)).folder
    source = load_tokenizer(resolve(recipe.source))
    check_same_tokenizer(source, load_tokenizer(folder), folder)
    return str(folder)


def advised_convert(recipe: Recipe, *, overwrite: bool = False) -> str:
    """The `upcycle convert` that makes what `upcycle run` makes of the `convert` section."""
    words = ["upcycle", "convert", recipe.source, str(Layout(recipe).converted)]
    defaults = {name: field.default for name, field in ConvertOptions.model_fields.items()}
    given = (name for name, value in recipe.convert if value != defaults[name])
    words += recipe.convert.words(given)
    return shlex.join([*words, *(["--overwrite"] if overwrite else [])])


def check_converted(recipe: Recipe) -> list[str]:
    """Refuse a converted folder that is not what the recipe makes of its source.

    Returns:
        What is not known of it, for people.

    Raises:
        TrainingError: it is missing, of another source, made by other options, or was changed.
        CheckpointError: it or its manifest is damaged, or the source is missing.
        EvaluationError: a teacher that the recipe names reads other tokens.
    """
    folder = Layout(recipe).converted
    if not folder.is_dir():
        raise TrainingError(
            f"there is no converted checkpoint {folder}",
            where=str(recipe.output),
            fix=f"run `{advised_convert(recipe)}`, or `upcycle run` with the recipe",
        )
    source = resolve(recipe.source)
    if recipe.train is not None and recipe.train.teacher is not None:
        check_teacher(recipe)
    checkpoint, manifest = Checkpoint.open(folder), read_manifest(folder)
    _check_kv_heads(checkpoint, recipe)
    origin = origin_of(manifest)
    if manifest is None or not origin:
        note = f"{folder.name} does not say what it was made from: it is taken for a conversion of "
        return [f"{note}{recipe.source} as the recipe asks for it"]
    vocabulary = {
        path.name: hash_file(path) for path in source.iterdir() if is_vocabulary(path.name)
    }
    other = not_of_origin(origin, {**weight_hashes(Checkpoint.open(source)), **vocabulary})
    if other:
        raise TrainingError(
            f"{folder} was not made from {recipe.source}: {', '.join(other)} there is another",
            where=f"{folder / MANIFEST_NAME}, and the recipe's source",
            fix="name the source that it was made from; to learn from another model, name that "
            f"one as train.teacher; or convert again: `{advised_convert(recipe, overwrite=True)}`",
        )
    _check_unchanged(checkpoint, manifest)
    if manifest.stage != CONVERT:
        note = f"{folder.name} was uptrained before: of the recipe's convert section only"
        return [f"{note} kv_heads is compared"]
    check_options(recipe.convert)
    changes = option_changes(manifest, recipe.convert)
    if changes:
        raise TrainingError(
            f"{folder} was not made by the recipe's convert section: {'; '.join(changes)}",
            where=str(folder / MANIFEST_NAME),
            fix=f"mend the recipe, or run `{advised_convert(recipe, overwrite=True)}`",
        )
    return []


def _check_kv_heads(checkpoint: Checkpoint, recipe: Recipe) -> None:
    found = shape_of(checkpoint.config).num_key_value_heads
    if found != recipe.convert.kv_heads:
        raise TrainingError(
            f"{checkpoint.folder} has {found} KV heads, and the recipe asks for "
            f"{recipe.convert.kv_heads}",
            where="recipe, convert.kv_heads",
            fix=f"mend the recipe, or run `{advised_convert(recipe, overwrite=True)}`",
        )


def _check_unchanged(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Refuse weights and a configuration that are no longer what the manifest tells of."""
    # An uptraining notes the weights alone.
    noted = manifest.result.weights if manifest.stage == TRAIN else manifest.result.files
    files = {
        name: known
        for name, known in noted.items()
        if is_of_model(name) and not is_vocabulary(name)
    }
    changed = other_files(files, weight_hashes(checkpoint))
    if changed:
        raise TrainingError(
            f"{', '.join(changed)} was changed after {checkpoint.folder} was made",
            where=str(checkpoint.folder),
            fix=f"make the folder again, or remove its {MANIFEST_NAME} to train it as it is",
        )
