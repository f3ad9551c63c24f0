"""The records of a package's weight file, read and copied piece by piece.

A file begins with a header of 64 bytes, whose first four count the records. Headers and data of
records begin at multiples of 64 (MILBlob's storage format 2, in coremltools' sources).
"""

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from upcycle.errors import ExportError
from upcycle.program.operation import Weight
from upcycle.program.specification import reading_product

_SENTINEL = 0xDEADBEEF
_HEADER = struct.Struct("<IIQQQ32x")
_COUNT = struct.Struct("<I")
_ALIGNMENT = 64
_PIECE = 1 << 20
_NUMPY = {"float16": "<f2", "float32": "<f4"}


class _Record(NamedTuple):
    sentinel: int
    kind: int  # of its elements
    size: int  # bytes of data
    begin: int  # of the data in the file
    padding: int  # bits without meaning at the end


def check_records(weights: Iterable[Weight]) -> None:
    """See that each constant has its record, whose data end within the file; none are read.

    Raises:
        ExportError: a file is missing or cut off, or holds another record there.
    """
    by_file: dict[Path, dict[int, int]] = {}
    for weight in weights:
        sizes = by_file.setdefault(weight.file, {})
        sizes[weight.offset] = max(weight.nbytes, sizes.get(weight.offset, 0))
    for path, sizes in by_file.items():
        with reading_product(path):
            if not path.is_file():
                raise _damaged("is missing", path)
            with path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                for offset in sorted(sizes):
                    _check_record(file, path, offset, sizes[offset], end)


def data_begin(weight: Weight) -> int:
    """Where a constant's data begin in its file, as the record before them says.

    Raises:
        ExportError: the file is missing or cut off, or holds another record there.
    """
    path, offset = weight.file, weight.offset
    if not path.is_file():
        raise _damaged("is missing", f"{path}, offset {offset}")
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        return _check_record(file, path, offset, weight.nbytes, end).begin


def _check_record(file: IO[bytes], path: Path, offset: int, nbytes: int, end: int) -> _Record:
    where = f"{path}, offset {offset}"
    if offset + _HEADER.size > end:
        raise _damaged("is cut off", where)
    file.seek(offset)
    record = _Record(*_HEADER.unpack(file.read(_HEADER.size)))
    if record.sentinel != _SENTINEL or record.size < nbytes:
        raise _damaged("does not hold this constant", where)
    if record.begin + record.size > end:
        raise _damaged("is cut off", where)
    return record


def _damaged(what: str, where: object) -> ExportError:
    return ExportError(f"the weight file {what}", where=str(where), fix="make the package again")


def largest_magnitude(weight: Weight, dtype: str) -> float:
    """The largest |x| of a constant, in memory of about a megabyte; NaN if it holds one."""
    import numpy as np

    largest = 0.0
    with weight.file.open("rb") as file:
        for piece in _pieces(file, _read_record(file, weight.offset)):
            values = np.abs(np.frombuffer(piece, _NUMPY[dtype])).max(initial=0)
            largest = max(largest, float(values)) if values == values else float("nan")
            if largest != largest:
                break
    return largest


class GrowingFile:
    """A weight file that takes over records of others, each content once.

    Args:
        file: of a package; records are appended to it.
        offsets: of its records.
    """

    def __init__(self, file: Path, offsets: set[int]) -> None:
        self._path = file
        with file.open("rb") as own:
            self._offsets = {_identity(own, offset): offset for offset in sorted(offsets)}

    def take(self, file: Path, offsets: set[int]) -> dict[int, int]:
        """Add records of another file.

        Returns:
            Where each record lies here, by its offset there.
        """
        places = {}
        with file.open("rb") as source, self._path.open("r+b") as own:
            for offset in sorted(offsets):
                identity = _identity(source, offset)
                if identity not in self._offsets:
                    self._offsets[identity] = _append(own, source, offset)
                places[offset] = self._offsets[identity]
        return places


def _append(own: IO[bytes], source: IO[bytes], offset: int) -> int:
    record = _read_record(source, offset)
    own.seek(0)
    (count,) = _COUNT.unpack(own.read(_COUNT.size))
    own.seek(0)
    own.write(_COUNT.pack(count + 1))
    end = own.seek(0, 2)
    place = end + -end % _ALIGNMENT
    begin = place + _HEADER.size
    own.write(bytes(place - end) + _HEADER.pack(*record._replace(begin=begin)))
    for piece in _pieces(source, record):
        own.write(piece)
    return place


def _identity(file: IO[bytes], offset: int) -> tuple[int, int, int, bytes]:
    """What two records have in common if they are the same constant."""
    record = _read_record(file, offset)
    digest = xxhash.xxh3_128()
    for piece in _pieces(file, record):
        digest.update(piece)
    return record.kind, record.size, record.padding, digest.digest()


def _read_record(file: IO[bytes], offset: int) -> _Record:
    file.seek(offset)
    record = _Record(*_HEADER.unpack(file.read(_HEADER.size)))
    assert record.sentinel == _SENTINEL
    return record


def _pieces(file: IO[bytes], record: _Record) -> Iterator[bytes]:
    file.seek(record.begin)
    left = record.size
    while left > 0:
        piece = file.read(min(left, _PIECE))
        left -= len(piece)
        yield piece
