"""`stages.json`: which stages of a recipe are finished, and what they left."""

import json
import shutil
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.marks import made_here
from upcycle.checkpoint.staging import check_output, write_file


class Record(BaseModel, frozen=True):
    """What is known of a stage.

    Attributes:
        fingerprint: of its options and inputs.
        files: the hashes of the files that it made; None where it was started and did not finish.
    """

    fingerprint: str
    files: dict[str, str] | None = None


_RECORDS = TypeAdapter(dict[str, Record])


class Records:
    """The records of a run, read at first and written at each change.

    A missing or damaged file holds none: every stage is then run again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Record] = {}
        if path.is_file():
            try:
                self._found = _RECORDS.validate_json(path.read_bytes())
            except ValidationError:
                self._found = {}

    def was_started(self, stage: str, fingerprint: str) -> bool:
        """Whether the stage was begun last by the same options from the same inputs."""
        found = self._found.get(stage)
        return found is not None and found.fingerprint == fingerprint

    def is_finished(self, stage: str, fingerprint: str, output: Path) -> bool:
        """Whether all files that the same stage made are there as it left them."""
        files = self._files(stage)
        if not (self.was_started(stage, fingerprint) and files):
            return False
        return files.keys() <= _names(output) and all(
            hash_file(output / name) == known for name, known in files.items()
        )

    def make_room(self, stage: str, output: Path) -> None:
        """Remove what is left of a damaged output.

        Raises:
            OutputError: something is there that was not made here.
        """
        # Without a manifest that can be read, its names alone tell it from a stranger's folder.
        is_ours = not output.is_symlink() and _names(output) <= self._files(stage).keys()
        if is_ours and output.is_dir() and not made_here(output):
            shutil.rmtree(output)
        check_output(output, overwrite=True)

    def start(self, stage: str, fingerprint: str) -> None:
        """Note that a stage begins."""
        self._write(stage, Record(fingerprint=fingerprint))

    def finish(self, stage: str, fingerprint: str, output: Path) -> None:
        """Note that a stage made its output."""
        files = {name: hash_file(output / name) for name in sorted(_names(output))}
        self._write(stage, Record(fingerprint=fingerprint, files=files))

    def _files(self, stage: str) -> dict[str, str]:
        found = self._found.get(stage)
        return {} if found is None else found.files or {}

    def _write(self, stage: str, record: Record) -> None:
        self._found[stage] = record
        text = json.dumps(_RECORDS.dump_python(self._found), indent=2, sort_keys=True)
        write_file(self._path, text + "\n")


def _names(output: Path) -> set[str]:
    """Every file below a folder; nothing where there is none."""
    return {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
