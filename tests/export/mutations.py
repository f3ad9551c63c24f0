"""Random damage to the program of a package, by a seed."""

import random
from collections.abc import Callable
from typing import Any

from upcycle.interpreter.prepare import EVALUATIONS

_NUMBERS = (0, 1, -1, 2, 3, 7, 63, 64, 65, -64, -65, 1000, 10**6, 2**31 - 1, -(2**31))
_SIZES = (0, 1, 2, 3, 63, 64, 65, 10**6, 10**12)
_WORDS = ("", "same", "custom", "TANH_APPROXIMATION", "add", "update", "no such word")


def functions_of(model: Any) -> list[Any]:
    """The functions of a `Model` message."""
    return [model.mlProgram.functions[name] for name in sorted(model.mlProgram.functions)]


def block_of(function: Any) -> Any:
    """The operations of a function, and its outputs."""
    return function.block_specializations[function.opset]


def mutate(model: Any, seed: int) -> str:
    """Damage a `Model` message in one place.

    Returns:
        What was done.
    """
    draw = random.Random(seed)
    function = draw.choice(functions_of(model))
    kind = list(_KINDS)[seed % len(_KINDS)]
    return f"{kind}: {_KINDS[kind](draw, function)}"


def _values(function: Any) -> list[str]:
    made = [value.name for op in block_of(function).operations for value in op.outputs]
    return [value.name for value in function.inputs] + made


def _operation(draw: random.Random, function: Any, *, constants: bool = False) -> Any:
    found = [op for op in block_of(function).operations if (op.type == "const") == constants]
    return draw.choice(found)


def _rebind(draw: random.Random, function: Any) -> str:
    op = _operation(draw, function)
    arguments = [each for key in sorted(op.inputs) for each in op.inputs[key].arguments]
    named = [each for each in arguments if each.WhichOneof("binding") == "name"]
    if not named:
        return "nothing"
    chosen = draw.choice(named)
    before, chosen.name = chosen.name, draw.choice(_values(function))
    return f"{op.type} reads {chosen.name} for {before}"


def _remove_operand(draw: random.Random, function: Any) -> str:
    op = _operation(draw, function)
    if not op.inputs:
        return "nothing"
    key = draw.choice(sorted(op.inputs))
    if draw.random() < 0.5:
        del op.inputs[key]
    else:
        del op.inputs[key].arguments[:]
    return f"{op.type} {key}"


def _add_operand(draw: random.Random, function: Any) -> str:
    op = _operation(draw, function)
    key = draw.choice(["x", "y", "axis", "begin", "squeeze_mask", "stride", "bias", "axes", "pad"])
    op.inputs[key].arguments.add().name = draw.choice(_values(function))
    return f"{op.type} {key}"


def _literal(draw: random.Random, function: Any) -> str:
    constants = [
        op
        for op in block_of(function).operations
        if op.type == "const" and op.attributes["val"].HasField("immediateValue")
    ]
    op = draw.choice(constants)
    tensor = op.attributes["val"].immediateValue.tensor
    kind = tensor.WhichOneof("value")
    name = op.outputs[0].name
    if kind == "bytes":
        tensor.bytes.values = draw.randbytes(
            max(0, len(tensor.bytes.values) + draw.choice([0, -1, 1]))
        )
    elif kind == "strings":
        tensor.strings.values[:] = [draw.choice(_WORDS)]
    elif kind in ("ints", "longInts", "bools", "floats", "doubles"):
        values = getattr(tensor, kind).values
        place = draw.randrange(len(values)) if len(values) else 0
        change = draw.choice(["set", "set", "set", "more", "fewer"])
        number = draw.choice(_NUMBERS)
        if kind == "bools":
            number = bool(number % 2)
        elif kind in ("floats", "doubles"):
            number = draw.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30])
        if change == "set" and len(values):
            values[place] = number
        elif change == "fewer" and len(values):
            del values[place]
        else:
            values.append(number)
        return f"{name} = {list(values)[:8]}"
    return name


def _retype(draw: random.Random, function: Any) -> str:
    op = _operation(draw, function)
    before, op.type = op.type, draw.choice(sorted(EVALUATIONS))
    return f"{before} becomes {op.type}"


def _tensor_types(function: Any) -> list[Any]:
    types = [value.type for op in block_of(function).operations for value in op.outputs]
    types += [value.type for value in function.inputs]
    found = []
    for each in types:
        kind = each.WhichOneof("type")
        wrapped = each.stateType.wrappedType if kind == "stateType" else each
        if wrapped.WhichOneof("type") == "tensorType":
            found.append(wrapped.tensorType)
    return found


def _reshape(draw: random.Random, function: Any) -> str:
    tensor = draw.choice(_tensor_types(function))
    change = draw.choice(["size", "size", "drop", "add", "unknown"])
    if change == "add" or not tensor.dimensions:
        tensor.dimensions.add().constant.size = draw.choice(_SIZES)
        tensor.rank += 1
    elif change == "drop":
        del tensor.dimensions[draw.randrange(len(tensor.dimensions))]
        tensor.rank -= 1
    elif change == "unknown":
        draw.choice(tensor.dimensions).unknown.variadic = False
    else:
        draw.choice(tensor.dimensions).constant.size = draw.choice(_SIZES)
    return change


def _redtype(draw: random.Random, function: Any) -> str:
    tensor = draw.choice(_tensor_types(function))
    kinds = tensor.DESCRIPTOR.fields_by_name["dataType"].enum_type.values_by_number
    tensor.dataType = draw.choice([*kinds, 999])
    return str(tensor.dataType)


def _delete(draw: random.Random, function: Any) -> str:
    operations = block_of(function).operations
    place = draw.randrange(len(operations))
    kind = operations[place].type
    del operations[place]
    return f"{kind} at {place}"


def _swap(draw: random.Random, function: Any) -> str:
    operations = block_of(function).operations
    one, other = sorted(draw.sample(range(len(operations)), 2))
    first, second = type(operations[one])(), type(operations[one])()
    first.CopyFrom(operations[one])
    second.CopyFrom(operations[other])
    operations[one].CopyFrom(second)
    operations[other].CopyFrom(first)
    return f"{one} and {other}"


def _duplicate(draw: random.Random, function: Any) -> str:
    operations = block_of(function).operations
    copied = draw.choice(operations)
    operations.add().CopyFrom(copied)
    return copied.type


def _outputs(draw: random.Random, function: Any) -> str:
    block = block_of(function)
    if draw.random() < 0.5:
        block.outputs[0] = draw.choice(_values(function))
    else:
        del block.outputs[:]
    return str(list(block.outputs))


def _inputs(draw: random.Random, function: Any) -> str:
    value = draw.choice(function.inputs)
    before = value.name
    if draw.random() < 0.5:
        value.name = "other"
    else:
        function.inputs.remove(value)
    return before


def _results(draw: random.Random, function: Any) -> str:
    op = _operation(draw, function)
    if op.outputs and draw.random() < 0.5:
        del op.outputs[0]
    else:
        added = op.outputs.add()
        added.name = "one_more"
        added.type.tensorType.dataType = 10
    return op.type


def _offset(draw: random.Random, function: Any) -> str:
    stored = [
        op.attributes["val"].blobFileValue
        for op in block_of(function).operations
        if op.type == "const" and op.attributes["val"].HasField("blobFileValue")
    ]
    blob, other = draw.choice(stored), draw.choice(stored)
    blob.offset = draw.choice([0, 64, 10**9, other.offset, other.offset])
    return str(blob.offset)


_KINDS: dict[str, Callable[[random.Random, Any], str]] = {
    "rebind": _rebind,
    "remove operand": _remove_operand,
    "add operand": _add_operand,
    "literal": _literal,
    "literal again": _literal,
    "retype": _retype,
    "reshape": _reshape,
    "redtype": _redtype,
    "delete": _delete,
    "swap": _swap,
    "duplicate": _duplicate,
    "outputs": _outputs,
    "inputs": _inputs,
    "results": _results,
    "offset": _offset,
}
