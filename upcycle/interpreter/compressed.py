"""Compressed weights, which become dense once, in the type that the program declares.

Nothing larger than the result is made on the way: coremltools' own look-up makes an array of all
elements times all palette entries.
"""

import math

import torch
from torch import Tensor

from upcycle.interpreter.arguments import Arguments, Evaluation
from upcycle.interpreter.constants import unpack

_AT_ONCE = 1 << 22  # elements


def _look_up(indices: Tensor, lut: Tensor, vector_axis: int) -> Tensor:
    """Palette entries by index.

    Args:
        indices: [d0, d1, ..].
        lut: [b0, b1, .., entries, width]: one palette for each block of d0/b0 × d1/b1 × ..
        vector_axis: the axis along which an entry's `width` values are laid.
    """
    *blocks, entries, width = lut.shape
    table = lut.reshape(-1, width)
    first = _first_entries(indices.shape, blocks, entries)
    found = torch.empty((*indices.shape, width), dtype=lut.dtype)
    rows = max(1, _AT_ONCE // max(1, math.prod(indices.shape[1:])))
    for start in range(0, indices.shape[0], rows):
        part = slice(start, start + rows)
        places = indices[part].long() + (first[part] if first.shape[0] > 1 else first)
        found[part] = table[places]
    axis = vector_axis % indices.ndim
    return found.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _first_entries(shape: torch.Size, blocks: list[int], entries: int) -> Tensor:
    """Where each element's palette begins in the table, broadcastable to the elements."""
    first = torch.zeros([1] * len(shape), dtype=torch.long)
    stride = entries
    for axis in reversed(range(len(shape))):
        if blocks[axis] > 1:
            block = torch.arange(shape[axis]) // (shape[axis] // blocks[axis])
            first = first + (block * stride).reshape(-1, *[1] * (len(shape) - 1 - axis))
        stride *= blocks[axis]
    return first


def _lut_to_dense(given: Arguments) -> Tensor:
    indices, lut = given.stored("indices"), given.stored("lut")
    if "shape" in given:  # iOS 16: packed indices and one palette
        shape = given.ints("shape")
        bits = int(math.log2(lut.numel()))
        flat = unpack(indices.numpy(), f"uint{bits}", math.prod(shape))
        indices = torch.from_numpy(flat).reshape(shape)
        lut = lut.reshape([1] * len(shape) + [-1, 1])
    return _look_up(indices, lut, given.integer("vector_axis", 0))


def _lut_to_sparse(given: Arguments) -> tuple[Tensor, Tensor]:
    mask, lut = given.stored("indices_mask"), given.stored("lut")
    indices = _scatter(mask, given.stored("indices_nonzero_data"))
    axis = given.integer("vector_axis", 0)
    dense, wide = _look_up(indices, lut, axis), mask.repeat_interleave(lut.shape[-1], axis)
    return wide, dense[wide.bool()]


def _shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Scale · (data − offset), each scale for a block of data; all of one rank."""
    blocked = [
        size
        for total, count in zip(data.shape, scale.shape, strict=True)
        for size in (count, total // count)
    ]
    apart = [size for count in scale.shape for size in (count, 1)]
    found = data.reshape(blocked).float()
    if offset is not None:
        found -= offset.reshape(apart).float()
    found *= scale.reshape(apart).float()
    return found.reshape(data.shape).to(scale.dtype)


def _blockwise_shift_scale(given: Arguments) -> Tensor:
    return _shift_scale(given.stored("data"), given.stored("scale"), given.optional("offset"))


def _sparse_shift_scale(given: Arguments) -> tuple[Tensor, Tensor]:
    mask = given.stored("data_mask")
    data = _scatter(mask, given.stored("nonzero_data"))
    dense = _shift_scale(data, given.stored("scale"), given.optional("offset"))
    return mask, dense[mask.bool()]


def _affine_dequantize(given: Arguments) -> Tensor:
    data, axis = given.stored("quantized_data"), given.integer("axis")
    shape = [-1 if i == axis % data.ndim else 1 for i in range(data.ndim)]

    def along(key: str) -> Tensor:
        value = given.stored(key)
        return value.reshape(shape if value.numel() > 1 else [1] * data.ndim)

    return _shift_scale(data, along("scale"), along("zero_point"))


def _scatter(mask: Tensor, nonzero: Tensor) -> Tensor:
    dense = torch.zeros(mask.shape, dtype=nonzero.dtype)
    dense[mask.bool()] = nonzero
    return dense


def _sparse_to_dense(given: Arguments) -> Tensor:
    mask = given.stored("mask")
    if "shape" in given:  # iOS 16: a packed mask
        shape = given.ints("shape")
        flat = unpack(mask.numpy(), "uint1", math.prod(shape))
        mask = torch.from_numpy(flat).reshape(shape)
    return _scatter(mask, given.stored("nonzero_data"))


COMPRESSED: dict[str, Evaluation] = {
    "constexpr_affine_dequantize": _affine_dequantize,
    "constexpr_blockwise_shift_scale": _blockwise_shift_scale,
    "constexpr_cast": lambda given: given.stored("source_val"),
    "constexpr_lut_to_dense": _lut_to_dense,
    "constexpr_lut_to_sparse": _lut_to_sparse,
    "constexpr_sparse_blockwise_shift_scale": _sparse_shift_scale,
    "constexpr_sparse_to_dense": _sparse_to_dense,
}
