"""Single constants of a weight file, read piece by piece."""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upcycle.export.graph import Weight

_SENTINEL = 0xDEADBEEF
_RECORD = struct.Struct("<IIQQ")  # sentinel, type, bytes of data, where they begin
_PIECE = 1 << 20
_NUMPY = {"float16": "<f2", "float32": "<f4"}


def largest_magnitude(weight: "Weight", dtype: str) -> float:
    """The largest |x| of a constant, in memory of about a megabyte; NaN if it holds one."""
    import numpy as np

    largest = 0.0
    for piece in _pieces(weight):
        values = np.abs(np.frombuffer(piece, _NUMPY[dtype])).max(initial=0)
        largest = max(largest, float(values)) if values == values else float("nan")
        if largest != largest:
            break
    return largest


def _pieces(weight: "Weight") -> Iterator[bytes]:
    with weight.file.open("rb") as file:
        file.seek(weight.offset)
        sentinel, _, size, begin = _RECORD.unpack(file.read(_RECORD.size))
        assert sentinel == _SENTINEL
        file.seek(begin)
        while size > 0:
            piece = file.read(min(size, _PIECE))
            size -= len(piece)
            yield piece
