"""Read the graph of a Core ML program from its specification."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upcycle.program.graph import Function, Graph
from upcycle.program.operation import Literal, Operation, TensorType, Weight
from upcycle.program.specification import all_operations, read_specification
from upcycle.program.values import declared_shape, dtype_name, literal_values
from upcycle.program.weight_file import check_records
from upcycle.program.wellformed import check_wellformed


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
