"""`stages.json`: what a run itself made, and may therefore make again.

Whether a stage is finished is told by its output's own manifest.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file, made_here
from upcycle.checkpoint.staging import check_output, write_file
from upcycle.pipeline.stage import Stage


class Record(BaseModel, frozen=True):
    """What a run left as a stage's output.

    Attributes:
        files: the hashes of its files.
        manifest: the hash of its manifest, which may lie beside it.
        read: a hash of what the stage read that its manifest does not tell.
    """

    files: dict[str, str] = {}
    manifest: str | None = None
    read: str | None = None


_RECORDS = TypeAdapter(dict[str, Record])


class Records:
    """The records of a run, read at first and written at each change.

    A missing or damaged file holds none: nothing is then known to be the run's own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Record] = {}
        if path.is_file():
            with suppress(ValidationError):
                self._found = _RECORDS.validate_json(path.read_bytes())

    def is_own(self, stage: Stage) -> bool:
        """Whether all that is there comes from the run: whole, damaged or in parts."""
        found = self.of(stage)
        # What replaced it later, by another command, has another manifest.
        was = found.manifest or found.files.get(MANIFEST_NAME)
        is_same = _hash(stage.manifest) in (was, None) or not made_here(stage.output)
        return is_same and _names(stage.output) <= found.files.keys()

    def make_room(self, stage: Stage) -> None:
        """Remove what is left of a damaged output.

        Raises:
            OutputError: something is there that was not made here.
        """
        # Without a manifest that can be read, its names alone tell it from a stranger's folder.
        output = stage.output
        is_ours = not output.is_symlink() and _names(output) <= self.of(stage).files.keys()
        if is_ours and output.is_dir() and not made_here(output):
            shutil.rmtree(output)
        check_output(output, overwrite=True)

    def finish(self, stage: Stage) -> None:
        """Note that the run made an output."""
        files = {name: hash_file(stage.output / name) for name in sorted(_names(stage.output))}
        record = Record(files=files, manifest=_hash(stage.manifest), read=stage.unnoted())
        self._found[stage.name] = record
        text = json.dumps(_RECORDS.dump_python(self._found), indent=2, sort_keys=True)
        write_file(self._path, text + "\n")

    def of(self, stage: Stage) -> Record:
        """What the run made as the stage's output; an empty record for nothing."""
        return self._found.get(stage.name, Record())


def _hash(file: Path) -> str | None:
    return hash_file(file) if file.is_file() else None


def _names(output: Path) -> set[str]:
    """Every file below a folder; nothing where there is none."""
    return {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
