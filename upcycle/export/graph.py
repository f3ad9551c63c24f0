"""The operations of a Core ML program, read from its specification."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from upcycle.export.blobs import check_records
from upcycle.export.kv_flow import KvFlow
from upcycle.export.proto_values import DATA_TYPES, declared_shape, dtype_name, literal_values
from upcycle.export.specification import all_operations, read_specification
from upcycle.export.wellformed import check_wellformed

Literal = tuple[float, ...] | tuple[str, ...]
METADATA_KEY = "upcycle"  # of the manifest of `upcycle export` in a package's metadata


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


@dataclass(frozen=True)
class Function:
    """One function of a program, its nested blocks flattened.

    Attributes:
        operations: in order, constants included.
        types: of every value, by name.
        states: types of the states, by name.
        weights: the constants that lie in a weight file, by name.
        inputs: names of the inputs, without the states.
        outputs: names of the outputs.
        literals: values of the constants that lie in the program itself, by name.
        declared: shapes of the inputs and states as the package promises them to an app, by name;
            a flexible dimension is written as a range.
    """

    operations: tuple[Operation, ...]
    types: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    weights: Mapping[str, Weight]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    literals: Mapping[str, Literal] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def histogram(self) -> Counter[str]:
        """How often each operation occurs, without constants."""
        return Counter(op.type for op in self.operations if op.type != "const")

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        """The operation that makes each value."""
        return {name: op for op in self.operations for name in op.outputs}

    @cached_property
    def kv(self) -> KvFlow:
        """Which of the values are keys and values of attention."""
        return KvFlow(self)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Every `tile`, with what it copies."""
        return tuple(
            Tile(
                self.types[op.outputs[0]].shape,
                self.types[op.outputs[0]].nbytes,
                of_kv=op.outputs[0] in self.kv.values,
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

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files that this function needs, each constant once."""
        return _stored_bytes([self])

    def literal(self, op: Operation, key: str) -> Literal | None:
        """The value of an operand that is a constant of the program itself."""
        names = op.inputs.get(key, ())
        return self.literals.get(names[0]) if names else None


@dataclass(frozen=True)
class Graph:
    """A Core ML program.

    Attributes:
        functions: by name; a package with one function calls it "main".
        metadata: what the exporter noted, such as its own manifest.
        default: name of the function that runs unless an app names another.
    """

    functions: Mapping[str, Function]
    metadata: Mapping[str, str]
    default: str

    @property
    def decode(self) -> Function:
        """The default function: in a language model the one that decodes."""
        return self.functions[self.default]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files, what several functions share counted once."""
        return _stored_bytes(self.functions.values())


def _stored_bytes(functions: Iterable[Function]) -> int:
    records = {
        (weight.file, weight.offset): weight.nbytes
        for function in functions
        for weight in function.weights.values()
    }
    return sum(records.values())


def read_graph(package: str | Path) -> Graph:
    """Read the graph of an `.mlpackage`; no weights are loaded, and neither is torch.

    Raises:
        ExportError: it is no Core ML package with an ML program, or a damaged one.
    """
    model, path = read_specification(Path(package)), Path(package)
    description = model.description
    declared = {each.name: each for each in description.functions}
    functions = {
        name: _read_function(function, declared.get(name, description), path)
        for name, function in sorted(model.mlProgram.functions.items())
    }
    for name, function in functions.items():
        check_wellformed(name, function, path)
        check_records(function.weights.values())
    default = description.defaultFunctionName or "main"
    metadata = dict(description.metadata.userDefined)
    return Graph(functions, metadata, default if default in functions else next(iter(functions)))


def _read_function(function: Any, description: Any, package: Path) -> Function:
    reader = _Reader(package)
    for value in function.inputs:
        if value.type.WhichOneof("type") == "stateType":
            reader.states[value.name] = _tensor_type(value.type.stateType.wrappedType)
        else:
            reader.types[value.name] = _tensor_type(value.type)
    names = tuple(reader.types)
    block = function.block_specializations[function.opset]
    operations = tuple(reader.read(op) for op in all_operations(block.operations))
    return Function(
        operations,
        reader.types,
        reader.states,
        reader.weights,
        inputs=names,
        outputs=tuple(block.outputs),
        literals=reader.literals,
        declared={
            each.name: declared_shape(each) for each in (*description.input, *description.state)
        },
    )


class _Reader:
    """Reads operations and collects what they say about values."""

    def __init__(self, package: Path) -> None:
        self.folder = package / "Data" / "com.apple.CoreML"
        self.types: dict[str, TensorType] = {}
        self.states: dict[str, TensorType] = {}
        self.weights: dict[str, Weight] = {}
        self.literals: dict[str, Literal] = {}

    def read(self, op: Any) -> Operation:
        inner = (value for block in op.blocks for value in block.inputs)
        self.types |= {value.name: _tensor_type(value.type) for value in (*op.outputs, *inner)}
        if op.type == "const" and op.outputs:
            self._add_constant(op.outputs[0].name, op.attributes["val"])
        inputs = {key: tuple(self._operands(op, key)) for key in op.inputs}
        if op.type.startswith("constexpr_"):  # before iOS 18 attributes are what they are made of
            inputs |= {
                key: (self._inner_constant(op, key, value),)
                for key, value in op.attributes.items()
                if key != "name"
            }
        return Operation(op.type, inputs, tuple(value.name for value in op.outputs))

    def _operands(self, op: Any, key: str) -> Iterator[str]:
        """Names of the values of one operand; a constant inside the operation gets a name."""
        for argument in op.inputs[key].arguments:
            if argument.WhichOneof("binding") == "name":
                yield argument.name
            else:
                yield self._inner_constant(op, key, argument.value)

    def _inner_constant(self, op: Any, key: str, value: Any) -> str:
        name = f"{op.outputs[0].name if op.outputs else op.type}.{key}"
        self.types[name] = _tensor_type(value.type)
        self._add_constant(name, value)
        return name

    def _add_constant(self, name: str, value: Any) -> None:
        if value.HasField("blobFileValue"):
            blob = value.blobFileValue
            file = Path(blob.fileName.replace("@model_path", str(self.folder)))
            self.weights[name] = Weight(self.types[name].nbytes, file, blob.offset)
        else:
            self.literals[name] = literal_values(value)


def _tensor_type(value_type: Any) -> TensorType:
    """The type of a value; lists and the like have no elements of their own."""
    if value_type.WhichOneof("type") != "tensorType":
        return TensorType((0,), "list")
    tensor = value_type.tensorType
    shape = tuple(
        int(dimension.constant.size) if dimension.HasField("constant") else None
        for dimension in tensor.dimensions
    )
    return TensorType(shape, dtype_name(tensor))
