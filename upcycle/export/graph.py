"""The operations of a Core ML program, read from its specification."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from upcycle.errors import ExportError
from upcycle.export.specification import read_specification

# Bits per element, by the number that MIL.proto gives each data type.
_BITS = {
    1: 8,  # BOOL
    10: 16, 11: 32, 12: 64, 13: 16,  # FLOAT16, FLOAT32, FLOAT64, BFLOAT16
    21: 8, 22: 16, 23: 32, 24: 64, 25: 4,  # INT8 .. INT64, INT4
    31: 8, 32: 16, 33: 32, 34: 64, 35: 4, 36: 2, 37: 1, 38: 6, 39: 3,  # UINT8 .. UINT3
    40: 8, 41: 8,  # FLOAT8
}  # fmt: skip
# What these make of a KV cache is still that cache: the same values, seen or copied.
_KEEPS_VALUES = {
    "cast",
    "concat",
    "expand_dims",
    "identity",
    "reshape",
    "slice_by_index",
    "slice_update",
    "split",
    "squeeze",
    "tile",
    "transpose",
}


@dataclass(frozen=True)
class TensorType:
    """Shape and element size of a value; a dimension is None where it is dynamic."""

    shape: tuple[int | None, ...]
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements; a dynamic dimension counts as 1."""
        return math.ceil(math.prod(size or 1 for size in self.shape) * self.bits / 8)


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
        of_kv: whether its input comes from a KV-cache state.
    """

    shape: tuple[int | None, ...]
    nbytes: int
    of_kv: bool


@dataclass(frozen=True)
class Function:
    """One function of a program, its nested blocks flattened.

    Attributes:
        operations: in order, constants included.
        types: of every value, by name.
        states: types of the states, by name.
        weights: bytes of the constants that lie in the weight file, by name, compressed as stored.
    """

    operations: tuple[Operation, ...]
    types: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    weights: Mapping[str, int]

    @cached_property
    def histogram(self) -> Counter[str]:
        """How often each operation occurs, without constants."""
        return Counter(op.type for op in self.operations if op.type != "const")

    @cached_property
    def kv_values(self) -> frozenset[str]:
        """Values that hold (part of) a state's content, copied or not."""
        found: set[str] = set()
        for op in self.operations:
            if op.type == "read_state" or (
                op.type in _KEEPS_VALUES and found.intersection(self.data_operands(op))
            ):
                found.update(op.outputs)
        return frozenset(found)

    def data_operands(self, op: Operation) -> tuple[str, ...]:
        """The operands whose values pass through an operation of `_KEEPS_VALUES`."""
        return op.inputs.get("x", ()) + op.inputs.get("values", ())

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Every `tile`, with what it copies."""
        return tuple(
            Tile(
                self.types[op.outputs[0]].shape,
                self.types[op.outputs[0]].nbytes,
                of_kv=op.outputs[0] in self.kv_values,
            )
            for op in self.operations
            if op.type == "tile"
        )

    @cached_property
    def state_writes(self) -> Counter[str]:
        """How often each state is written."""
        writes = Counter(dict.fromkeys(self.states, 0))
        writes.update(op.inputs["input"][0] for op in self.operations if op.type == "write_state")
        return writes

    @property
    def is_static(self) -> bool:
        """Whether every shape is known, so that bytes can be counted."""
        return all(None not in tensor.shape for tensor in self.types.values())


@dataclass(frozen=True)
class Graph:
    """A Core ML program.

    Attributes:
        functions: by name; a package with one function calls it "main".
        metadata: what the exporter noted, such as its own manifest.
    """

    functions: Mapping[str, Function]
    metadata: Mapping[str, str]


def read_graph(package: str | Path) -> Graph:
    """Read the graph of an `.mlpackage`; no weights are loaded, and neither is torch.

    Raises:
        ExportError: it is no Core ML package with an ML program, or a damaged one.
    """
    model = read_specification(Path(package))
    functions = {
        name: _read_function(function, Path(package))
        for name, function in sorted(model.mlProgram.functions.items())
    }
    return Graph(functions, dict(model.description.metadata.userDefined))


def _read_function(function: Any, package: Path) -> Function:
    block = function.block_specializations[function.opset]
    types: dict[str, TensorType] = {}
    states: dict[str, TensorType] = {}
    for value in function.inputs:
        if value.type.WhichOneof("type") == "stateType":
            states[value.name] = _tensor_type(value.type.stateType.wrappedType)
        else:
            types[value.name] = _tensor_type(value.type)
    operations = []
    weights = {}
    for op in _flatten(block.operations):
        outputs = tuple(value.name for value in op.outputs)
        types |= {value.name: _tensor_type(value.type) for value in op.outputs}
        inputs = {
            key: tuple(argument.name for argument in value.arguments if argument.name)
            for key, value in op.inputs.items()
        }
        operations.append(Operation(op.type, inputs, outputs))
        if op.type == "const" and op.attributes["val"].HasField("blobFileValue"):
            weights[outputs[0]] = types[outputs[0]].nbytes
    if not operations:
        raise ExportError(
            "the program has a function without operations",
            where=str(package),
            fix="make the package again",
        )
    return Function(tuple(operations), types, states, weights)


def _flatten(operations: Iterable[Any]) -> Iterator[Any]:
    for op in operations:
        yield op
        for block in op.blocks:
            yield from _flatten(block.operations)


def _tensor_type(value_type: Any) -> TensorType:
    """The type of a value; lists and the like have no elements of their own."""
    if value_type.WhichOneof("type") != "tensorType":
        return TensorType((0,), 0)
    tensor = value_type.tensorType
    shape = tuple(
        int(dimension.constant.size) if dimension.HasField("constant") else None
        for dimension in tensor.dimensions
    )
    return TensorType(shape, _BITS.get(tensor.dataType, 0))
