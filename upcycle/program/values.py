"""Types and constants of a Core ML specification, as plain Python values."""

import math
import struct
from collections.abc import Iterator
from typing import Any

# Bits per element, by the name that MIL.proto gives each data type.
DATA_TYPES = {
    "bool": 8, "float8e4m3fn": 8, "float8e5m2": 8,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64,
    "int4": 4, "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6,
    "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
}  # fmt: skip
LARGEST_FP16 = 65504
# `struct` codes of the types that a specification keeps as bytes.
_PACKED = {"float16": "e", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "uint32": "I"}

_WORD = 3  # bytes, which hold whole integers of 1, 2, 3, 4 and 6 bits


def dtype_name(tensor_type: Any) -> str:
    """The name of a `TensorType` message's data type, such as "float16"."""
    values = tensor_type.DESCRIPTOR.fields_by_name["dataType"].enum_type.values_by_number
    known = values.get(tensor_type.dataType)
    return known.name.lower() if known else "unknown"


def literal_values(value: Any) -> tuple[float, ...] | tuple[str, ...]:
    """The elements of a constant that lies in the program; empty for what is no tensor."""
    immediate = value.immediateValue
    if immediate.WhichOneof("value") != "tensor":
        return ()
    kind = immediate.tensor.WhichOneof("value")
    if kind is None:
        return ()
    elements = getattr(immediate.tensor, kind).values
    if kind != "bytes":
        return tuple(elements)
    dtype = dtype_name(value.type.tensorType)
    if DATA_TYPES.get(dtype, 8) < 8:
        count = math.prod(size.constant.size for size in value.type.tensorType.dimensions)
        return tuple(_narrow_integers(elements, dtype))[:count]
    code = _PACKED.get(dtype)
    if code is None:
        return ()
    count, rest = divmod(len(elements), struct.calcsize(f"<{code}"))
    return struct.unpack(f"<{count}{code}", elements[: len(elements) - rest])


def _narrow_integers(packed: bytes, dtype: str) -> Iterator[int]:
    """Integers of less than a byte, from the lowest bit of each byte on, and what pads the end."""
    bits = DATA_TYPES[dtype]
    bias = 0 if dtype.startswith("u") else 1 << (bits - 1)
    for start in range(0, len(packed), _WORD):
        word = int.from_bytes(packed[start : start + _WORD], "little")
        for shift in range(0, 8 * _WORD, bits):
            yield (((word >> shift) & ((1 << bits) - 1)) ^ bias) - bias


def declared_shape(feature: Any) -> str:
    """The shape of an input or state as the package promises it, such as "[1, 1..512]"."""
    kind = feature.type.WhichOneof("Type")
    if kind not in ("multiArrayType", "stateType"):
        return str(kind)
    array = (
        feature.type.multiArrayType
        if kind == "multiArrayType"
        else feature.type.stateType.arrayType
    )
    flexible = array.WhichOneof("ShapeFlexibility")
    if flexible == "shapeRange":
        return str([_range(each) for each in array.shapeRange.sizeRanges]).replace("'", "")
    if flexible == "enumeratedShapes":
        return " or ".join(str(list(each.shape)) for each in array.enumeratedShapes.shapes)
    return str(list(array.shape))


def _range(sizes: Any) -> str:
    if sizes.upperBound == sizes.lowerBound:
        return str(sizes.lowerBound)
    return f"{sizes.lowerBound}..{'' if sizes.upperBound < 0 else sizes.upperBound}"
