"""Matrix products, convolutions and attention. Weights are widened to fp32 piece by piece."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.interpreter.arguments import Arguments, Evaluation, broadcast, computed

_WIDENED_AT_ONCE = 1 << 18  # elements: 1 MiB in fp32, which stays in a core's cache


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias for x [.., I] in fp32 and a weight [O, I] as it is stored."""
    rows = max(1, _WIDENED_AT_ONCE // weight.shape[1])
    parts = [x @ computed(part).T for part in torch.split(weight, rows)]
    product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return product if bias is None else product + bias


def _linear(given: Arguments) -> Tensor:
    x, weight = given.tensor("x"), given.stored("weight")
    given.expect((*x.shape[:-1], weight.shape[0]))
    return _project(x, weight, given.optional("bias"))


def _matmul(given: Arguments) -> Tensor:
    x, y = given.tensor("x"), given.tensor("y")
    x = x.mT if given.flag("transpose_x") else x
    y = y.mT if given.flag("transpose_y") else y
    if min(x.ndim, y.ndim) > 1:
        given.expect((*broadcast(x[..., :1, :1], y[..., :1, :1])[:-2], x.shape[-2], y.shape[-1]))
    return x @ y


def _einsum(given: Arguments) -> Tensor:
    equation, values = given.text("equation"), [*map(computed, given.all_stored("values"))]
    letters, _, result = equation.replace(" ", "").partition("->")
    sizes = {
        letter: size
        for term, value in zip(letters.split(","), values, strict=True)
        for letter, size in zip(term, value.shape, strict=True)
    }
    given.expect([sizes[letter] for letter in result])
    return torch.einsum(equation, *values)


def _conv(given: Arguments) -> Tensor:
    x, weight, bias = given.tensor("x"), given.stored("weight"), given.optional("bias")
    axes = x.ndim - 2
    kernel = weight.shape[2:]
    strides, dilations = given.ints("strides", [1] * axes), given.ints("dilations", [1] * axes)
    groups = given.integer("groups", 1)
    before, after = _padding(given, x.shape[2:], kernel, strides, dilations)
    spans = zip(x.shape[2:], before, after, kernel, strides, dilations, strict=True)
    places = [
        (size + sum(pads) - (width - 1) * dilation - 1) // stride + 1
        for size, *pads, width, stride, dilation in spans
    ]
    given.expect((x.shape[0], weight.shape[0], *places))
    if groups == math.prod(kernel) == math.prod(strides) == 1 and not any(before + after):
        return _project(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    padded = functional.pad(x, pads)
    return function(padded, computed(weight), bias, strides, 0, dilations, groups)


def _padding(
    given: Arguments,
    sizes: torch.Size,
    kernel: torch.Size,
    strides: list[int],
    dilations: list[int],
) -> tuple[list[int], list[int]]:
    """Zeros before and after each axis."""
    kind = given.text("pad_type", "valid")
    if kind == "custom":
        pads = given.ints("pad", [0] * 2 * len(kernel))
        return pads[::2], pads[1::2]
    if not kind.startswith("same"):
        return [0] * len(kernel), [0] * len(kernel)
    spans = zip(sizes, kernel, strides, dilations, strict=True)
    total = [
        max(0, (math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        for size, width, stride, dilation in spans
    ]
    less, more = [pad // 2 for pad in total], [pad - pad // 2 for pad in total]
    return (more, less) if kind == "same_lower" else (less, more)


def _attention(given: Arguments) -> Tensor:
    query, key, value = (given.tensor(name) for name in ("query", "key", "value"))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    mask = given.optional("attn_mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ value


CONTRACTIONS: dict[str, Evaluation] = {
    "conv": _conv,
    "einsum": _einsum,
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
}
