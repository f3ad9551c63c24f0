"""JSON Lines, read with tolerance for single rows and precision about which."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upcycle.data.ledger import Document, Ledger
from upcycle.data.rows import document_of
from upcycle.errors import DataError

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how its files begin


def read_jsonl(path: Path, text_column: str | None, ledger: Ledger) -> Iterator[Document]:
    """The documents of a JSONL file, or of a file that holds one JSON array.

    A byte-order mark, CRLF and blank lines are fine.

    Raises:
        DataError: the file is UTF-16, or an array that is not UTF-8, with the offset.
    """
    for where, row in _rows(path, ledger):
        if not isinstance(row, dict):
            ledger.refuse(where, f"not a JSON object: {type(row).__name__}")
        elif document := document_of(row, where, text_column, ledger):
            yield document


def _rows(path: Path, ledger: Ledger) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            where = f"{path.name}:{number}"
            offset += len(line)
            try:
                data = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                text = decode(data, path, offset - len(data))
            except DataError as error:
                if number == 1 and line[:2] in _UTF_16:
                    raise  # no line of it can be read
                ledger.refuse(where, error.what, error.fix)
                continue
            if not text.strip():
                continue
            if number == 1 and text.lstrip().startswith("["):
                yield from _array(path, ledger)
                return
            try:
                yield where, json.loads(text, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                ledger.refuse(where, f"not JSON: {error}")


def _array(path: Path, ledger: Ledger) -> Iterator[tuple[str, Any]]:
    try:
        text = decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), path, 0)
        rows = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        ledger.refuse(path.name, f"not JSON: {error}")
        return
    yield from ((f"{path.name}[{index}]", row) for index, row in enumerate(rows))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key given twice is an error, for either value may be the wrong one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return found


def decode(data: bytes, path: Path, offset: int) -> str:
    """Bytes as UTF-8.

    Args:
        data: what to decode.
        path: the file, for the error.
        offset: where in the file `data` starts.

    Raises:
        DataError: with the byte's offset and what the encoding may be.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        is_utf_16 = data[:2] in _UTF_16
        guess = "UTF-16" if is_utf_16 else "Latin-1 or Windows-1252"
        name = "UTF-16" if is_utf_16 else "WINDOWS-1252"
        raise DataError(
            f"{path.name} is not UTF-8: byte 0x{data[error.start]:02x} "
            f"at offset {offset + error.start}",
            where=str(path),
            fix=f"it may be {guess}; convert it with `iconv -f {name} -t UTF-8`",
        ) from error
