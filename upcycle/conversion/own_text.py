"""The text that a conversion has its source write, before anything is measured on it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import scratch_folder, write_file, writing
from upcycle.errors import DeviceError, OutputError
from upcycle.kvcache.sampling import sampling_bytes
from upcycle.memory import free_memory
from upcycle.models.calibration_text import row_counts, row_length
from upcycle.models.loading import choose_device
from upcycle.options.base import SELF
from upcycle.options.convert import MergeOptions
from upcycle.progress import Watcher, ignore
from upcycle.utf8 import to_json

OWN_TEXT, OWN_RECORD = ".calibration.jsonl", ".calibration.json"  # beside what is being made
Options = TypeVar("Options", bound=MergeOptions)


def published(output: Path) -> Path:
    """Where the text of a conversion stays."""
    return output.with_name(f"{output.name}{OWN_TEXT}")


def check_published(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace the text of another conversion unasked.

    Raises:
        OutputError: it is there.
    """
    path = published(output)
    if path.exists() and not overwrite:
        raise OutputError(
            f"{path} exists",
            where=str(path.resolve()),
            fix=f"read it again with --calibration {path.name}, or pass --overwrite to replace it",
        )


def publish(folder: Path, output: Path) -> None:
    """Put the text of a conversion that is done where it stays."""
    with writing(output):
        (folder / OWN_TEXT).replace(published(output))


def check_memory(checkpoint: Checkpoint, device: str) -> None:
    """Refuse a source that is too large to be held whole.

    Raises:
        DeviceError: less memory is free than it needs, or this machine lacks the device.
    """
    place = choose_device(device)
    needed, free = sampling_bytes(checkpoint), free_memory(place)
    if needed > free:
        raise DeviceError(
            f"to write its own text the whole model is held: {needed / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB are free",
            where=f"{checkpoint.folder}, --calibration {SELF} on {place}",
            fix="have a larger machine convert it once, and pass its OUT.calibration.jsonl here",
        )


def with_own_text(
    options: Options,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    resume: bool = False,
    request: Any = None,
    watch: Watcher = ignore,
) -> tuple[Options, dict[str, Any]]:
    """Have the source write its share of the text, and name that file instead of the word.

    Args:
        options: with `self` among their texts.
        checkpoint: the source as opened.
        folder: where the text goes, `OWN_TEXT`.
        resume: take what is there from the same request.
        request: whatever else the text depends on, as JSON values.
        watch: told the tokens that are there.

    Returns:
        The options with the file, and what became of the text for the manifest.

    Raises:
        UpcycleError: as for `write_own_text`.
    """
    from upcycle.models.sampling import write_own_text

    length = row_length(checkpoint, options.calibration_window)
    rows = max(1, options.calibration_tokens // length)
    counts = row_counts(rows, options.shares or (1.0,))
    own = options.calibration.index(Path(SELF))
    tokens = counts[own] * length
    path, record = folder / OWN_TEXT, folder / OWN_RECORD
    asked = {"tokens": tokens, "seed": options.seed, "request": request}
    known = _read(record) if resume and path.is_file() else {}
    if known.get("asked") != asked:
        made = write_own_text(
            checkpoint,
            path,
            tokens=tokens,
            seed=options.seed,
            device=choose_device(options.device),
            watch=watch,
        )
        known = {"asked": asked, "made": {**asdict(made), "summary": made.summary()}}
        write_file(record, to_json(known))
    texts = tuple(path if index == own else t for index, t in enumerate(options.calibration))
    update = {"calibration": texts, "calibration_weights": options.shares}
    return options.model_copy(update=update), known["made"]


@contextmanager
def own_text_once(options: Options, checkpoint: Checkpoint) -> Iterator[Options]:
    """Options whose texts are all files, for work that leaves nothing behind."""
    if not options.own_text:
        yield options
        return
    with scratch_folder() as folder:
        yield with_own_text(options, checkpoint, folder)[0]


def _read(record: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
