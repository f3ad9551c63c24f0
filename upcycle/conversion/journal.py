"""What a conversion has finished, kept beside its files so that a killed one can go on."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import parse_json_object
from upcycle.checkpoint.staging import sync
from upcycle.errors import OutputError

JOURNAL_NAME = ".journal.jsonl"


@dataclass(frozen=True)
class FinishedShard:
    """An output file that was written and proven.

    Attributes:
        name: of the file.
        digest: its content hash.
        sources: content hashes of the files that it was made from, by name.
    """

    name: str
    digest: str
    sources: Mapping[str, str]


class Journal:
    """JSON lines: the request first, then one line for each finished shard.

    Args:
        folder: where the shards are written.
        request: everything that shapes their bytes, by a name for people.
        resume: go on with what is there; otherwise begin anew.

    Raises:
        OutputError: what is there was begun for another request.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], *, resume: bool) -> None:
        self._path = folder / JOURNAL_NAME
        self.finished: dict[str, FinishedShard] = {}
        lines = _read_lines(self._path) if resume else []
        if lines:
            _check_request(lines[0], request, folder)
            shards = [_shard(line) for line in lines[1:]]
            self.finished = {shard.name: shard for shard in shards if shard is not None}
        # Written anew: the end of a line that a kill cut off must not meet the next one.
        rewritten = self._path.with_suffix(".new")
        records = [asdict(shard) for shard in self.finished.values()]
        text = "".join(json.dumps(line) + "\n" for line in [dict(request), *records])
        rewritten.write_text(text, encoding="utf-8")
        sync(rewritten)
        os.replace(rewritten, self._path)
        sync(folder)

    def add(self, shard: FinishedShard) -> None:
        """Note a finished shard; of two records of one name the later counts."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(shard)) + "\n")
        sync(self._path)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The records up to the first one that is not whole."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                lines.append(parse_json_object(line)[1])
            except ValueError:
                break
    return lines


def _shard(record: Mapping[str, Any]) -> FinishedShard | None:
    """The shard of a record, or None where it is none."""
    match record:
        case {"name": str(name), "digest": str(digest), "sources": dict(sources), **rest}:
            return None if rest else FinishedShard(name, digest, sources)
    return None


def _check_request(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise OutputError(
            f"the unfinished conversion was begun with another {', '.join(differing[:3])}{more}",
            where=str(folder),
            fix="repeat that conversion's command with --resume, or begin anew without --resume",
        )
