"""The operations of a program, and the types of what they read and make."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upcycle.program.values import DATA_TYPES

Literal = tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True)
class TensorType:
    """Shape and element type of a value; a dimension is None where it is dynamic."""

    shape: tuple[int | None, ...]
    dtype: str

    @property
    def bits(self) -> int:
        """Bits per element; 0 for what has no elements."""
        return DATA_TYPES.get(self.dtype, 0)

    @property
    def elements(self) -> int:
        """Number of elements; a dynamic dimension counts as 1."""
        return math.prod(1 if size is None else size for size in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements; a dynamic dimension counts as 1."""
        return math.ceil(self.elements * self.bits / 8)


@dataclass(frozen=True)
class Weight:
    """A constant in a weight file: its bytes, compressed as stored, and where its record begins."""

    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True)
class Operation:
    """One MIL operation: its type, and the names of the values that it reads and makes."""

    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """All values read, in no particular order."""
        return tuple(name for names in self.inputs.values() for name in names)


@dataclass(frozen=True)
class Tile:
    """A `tile`, which writes copies of its input.

    Attributes:
        shape: of its output.
        nbytes: of its output.
        of_kv: whether it copies keys or values, cached or new.
    """

    shape: tuple[int | None, ...]
    nbytes: int
    of_kv: bool
