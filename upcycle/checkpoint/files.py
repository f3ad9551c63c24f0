"""Open and parse untrusted files: never hang, never guess."""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from upcycle.errors import CheckpointError
from upcycle.utf8 import shown

_CHUNK = 1 << 18  # fits a core's cache, and the kernel finds pages for it without a search
FETCH_AGAIN = "mend it or fetch it again"
_LARGEST_JSON = 64 << 20  # the index of the largest public model has 9 MB
_DEEPEST_JSON = 200
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST_NUMBER = 100  # digits; Python refuses to print integers of more than 4300


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading; what the file system refuses becomes an error to mend.

    A pipe or a device is refused without waiting for its other end.

    Raises:
        CheckpointError: it is missing, no regular file, or cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(
                    f"{path.name} is not a regular file",
                    where=str(path),
                    fix="put the file itself there; folders, pipes and devices are not read",
                )
            yield file
    except FileNotFoundError as error:
        link = f": a link to {os.readlink(path)}, which is gone" if path.is_symlink() else ""
        raise CheckpointError(
            f"{path.name} is missing{link}",
            where=str(path),
            fix="fetch it again; config.json and every shard that the index names must be there",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path.name}: {error.strerror}",
            where=str(path),
            fix="make the file readable, or fetch it again",
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe's other end may never come


def chunks_of(path: Path, begin: int = 0, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a file, a part at a time.

    Args:
        path: the file.
        begin: the first byte.
        size: how many; to the end of the file where None.

    Raises:
        CheckpointError: as for `reading`, or the file has become shorter.
    """
    with reading(path) as file:
        left = os.fstat(file.fileno()).st_size - begin if size is None else size
        file.seek(begin)
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise _shorter(path)
            left -= len(chunk)
            yield chunk


def read_into(path: Path, begin: int, view: memoryview) -> None:
    """Fill a buffer of bytes with those of a file from `begin` on.

    Raises:
        CheckpointError: as for `chunks_of`.
    """
    with reading(path) as file:
        file.seek(begin)
        while view:
            count = file.readinto(view)
            if not count:
                raise _shorter(path)
            view = view[count:]


def _shorter(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name} became shorter while it was read",
        where=str(path),
        fix="keep the source unchanged during a conversion",
    )


def visible_files(folder: Path) -> list[str]:
    """Relative paths below a folder, without hidden entries, pipes, devices and linked folders.

    Raises:
        CheckpointError: a folder cannot be listed, or a name is not UTF-8.
    """

    def refuse(error: OSError) -> None:
        raise not_listed(error, error.filename) from error

    found = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            # A link to nothing is kept: whoever reads it says so.
            if not name.startswith(".") and (path.is_file() or path.is_symlink()):
                found.append(path.relative_to(folder).as_posix())
    for relative in found:
        if shown(relative) != relative:
            raise CheckpointError(
                f"a file name is not UTF-8: '{shown(relative)}'",
                where=str(folder),
                fix="rename the file",
            )
    return sorted(found)


def not_listed(error: OSError, where: str | Path) -> CheckpointError:
    """The error for a folder that the system does not list, as its own error tells."""
    return CheckpointError(
        f"cannot list {error.filename}: {error.strerror}",
        where=str(where),
        fix="make the folder readable",
    )


def check_files(folder: Path) -> None:
    """Refuse, before any work, a folder with files that could not be copied or hashed after it.

    Raises:
        CheckpointError: as for `visible_files`, or a file cannot be opened, as a link to nothing.
    """
    for name in visible_files(folder):
        with reading(folder / name):
            pass


def read_json_object(path: Path) -> tuple[str, dict[str, Any]]:
    """A JSON file as its very text, line ends included, and as a dictionary.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object that has one reading.
    """
    with reading(path) as file:
        data = file.read(_LARGEST_JSON + 1)
    if len(data) > _LARGEST_JSON:
        raise CheckpointError(
            f"{path.name} has more than {_LARGEST_JSON >> 20} MiB",
            where=str(path),
            fix="fetch it again: no configuration or index is that large",
        )
    try:
        return parse_json_object(data)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} is not readable JSON: {error}", where=str(path), fix=FETCH_AGAIN
        ) from error


def parse_json_object(data: bytes) -> tuple[str, dict[str, Any]]:
    """UTF-8 JSON as text and as a dictionary.

    Raises:
        ValueError: it is no JSON object; a key comes twice, so that readers differ in what they
            take; or names or numbers are beyond what other readers can hold.
    """
    text = data.decode("utf-8")
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_int=_bounded)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    if _deeper_than(_DEEPEST_JSON, document):
        raise ValueError("it is nested too deeply")
    if _SURROGATE.search(text):
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # half of a pair has no bytes
    return text, document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} comes twice")
    return document


def _bounded(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _deeper_than(limit: int, value: object) -> bool:
    if limit == 0 or not isinstance(value, dict | list):
        return limit == 0
    children = value.values() if isinstance(value, dict) else value
    return any(_deeper_than(limit - 1, child) for child in children)


@contextmanager
def under_utf8_name(folder: Path) -> Iterator[Path]:
    """The folder itself, or where its path has bytes that are no UTF-8, a link to it.

    File systems take such names and so does Python (PEP 383); safetensors, tokenizers and
    coremltools do not.
    """
    if shown(str(folder)) == str(folder):
        yield folder
        return
    with TemporaryDirectory() as place:
        link = Path(place, "folder")
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link
