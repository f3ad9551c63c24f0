"""Constants of a program as torch tensors: mapped from the weight file, or from the program."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.program.operation import TensorType, Weight
from upcycle.program.weight_file import data_begin

# What each of MIL's types is kept as; torch has little arithmetic of unsigned integers.
TORCH_TYPES = {
    "bool": torch.bool,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float32": torch.float32, "float64": torch.float64,
    "int4": torch.int8, "int8": torch.int8, "int16": torch.int16,
    "int32": torch.int32, "int64": torch.int64,
    "uint1": torch.uint8, "uint2": torch.uint8, "uint3": torch.uint8, "uint4": torch.uint8,
    "uint6": torch.uint8, "uint8": torch.uint8,
    "uint16": torch.int32, "uint32": torch.int64,
}  # fmt: skip
_UNSIGNED = {"uint16": np.uint16, "uint32": np.uint32}
_UNPACKED_AT_ONCE = 1 << 20  # elements; a multiple of 8, so that each piece begins with a byte
_REMAKE = "make the package again"


def read_weight(weight: Weight, tensor_type: TensorType) -> Tensor:
    """A constant of a weight file, of its declared shape.

    Whole elements stay in the file, mapped into memory.

    Raises:
        ExportError: the file is missing or shorter than the program says, or the type is unknown.
    """
    where, dtype = f"{weight.file}, offset {weight.offset}", tensor_type.dtype
    shape = _known_shape(tensor_type, where)
    start = data_begin(weight)
    # Copy-on-write: torch refuses memory that is not writable.
    stored = np.memmap(weight.file, np.uint8, "c", start, (tensor_type.nbytes,))
    if dtype not in TORCH_TYPES:
        raise ExportError(f"a constant has the type {dtype}", where=where, fix=_REMAKE)
    if tensor_type.bits < 8:
        return torch.from_numpy(unpack(stored, dtype, math.prod(shape))).reshape(shape)
    if dtype in _UNSIGNED:
        whole = stored.view(_UNSIGNED[dtype]).astype(np.int64)
        return torch.from_numpy(whole).to(TORCH_TYPES[dtype]).reshape(shape)
    return torch.from_numpy(stored).view(TORCH_TYPES[dtype]).reshape(shape)


def literal_tensor(values: Sequence[float], tensor_type: TensorType, name: str) -> Tensor:
    """A constant that lies in the program itself, of its declared shape.

    Raises:
        ExportError: it has a type that cannot be read.
    """
    shape = _known_shape(tensor_type, name)
    if tensor_type.dtype not in TORCH_TYPES or len(values) != math.prod(shape):
        raise ExportError(
            f"a constant of type {tensor_type.dtype} cannot be read", where=name, fix=_REMAKE
        )
    return torch.tensor(values, dtype=TORCH_TYPES[tensor_type.dtype]).reshape(shape)


def unpack(stored: NDArray[np.uint8], dtype: str, count: int) -> NDArray[np.uint8 | np.int8]:
    """Elements of 1, 2, 3, 4 or 6 bits, packed from the lowest bit of each byte on.

    Args:
        stored: [bytes].
        dtype: int4 or uint1 .. uint6.
        count: number of elements.

    Returns:
        [count], a byte for each.
    """
    bits = int(dtype.lstrip("uint"))
    found = np.empty(count, np.uint8)
    for start in range(0, count, _UNPACKED_AT_ONCE):
        stop = min(start + _UNPACKED_AT_ONCE, count)
        packed = stored[start * bits // 8 : math.ceil(stop * bits / 8)]
        apart = np.unpackbits(packed, bitorder="little")[: (stop - start) * bits]
        found[start:stop] = np.packbits(apart.reshape(-1, bits), axis=1, bitorder="little")[:, 0]
    if dtype.startswith("u"):
        return found
    return ((found ^ (1 << (bits - 1))).astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def _known_shape(tensor_type: TensorType, where: str) -> tuple[int, ...]:
    sizes = tuple(size for size in tensor_type.shape if size is not None)
    if len(sizes) < len(tensor_type.shape):
        raise ExportError("a constant has a dynamic shape", where=where, fix=_REMAKE)
    return sizes
