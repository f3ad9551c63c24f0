"""Operations along an axis: sums, norms, softmax, sorting."""

from collections.abc import Callable

import torch
from torch import Tensor

from upcycle.interpreter.arguments import Arguments, Evaluation


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Evaluation:
    """A function of x, the axes (all where none are named) and whether they stay with size 1."""

    def evaluate(given: Arguments) -> Tensor:
        x = given.tensor("x")
        axes = given.ints("axes", list(range(x.ndim)))
        return function(x, axes, given.flag("keep_dims"))

    return evaluate


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _argument(function: Callable[..., Tensor]) -> Evaluation:
    return lambda given: function(
        given.tensor("x"), given.integer("axis", -1), keepdim=given.flag("keep_dims")
    )


def _cumsum(given: Arguments) -> Tensor:
    x, axis = given.tensor("x"), given.integer("axis", 0)
    x = x.flip(axis) if given.flag("reverse") else x
    total = x.cumsum(axis)
    total = total - x if given.flag("exclusive") else total
    return total.flip(axis) if given.flag("reverse") else total


def _sorted(given: Arguments) -> tuple[Tensor, Tensor]:
    descending = not given.flag("ascending")
    # Of equal elements the first counts, as in Core ML.
    values, indices = torch.sort(
        given.tensor("x"), dim=given.integer("axis", -1), descending=descending, stable=True
    )
    return values, indices


def _topk(given: Arguments) -> Tensor | tuple[Tensor, ...]:
    values, indices = _sorted(given)
    axis, count = given.integer("axis", -1), given.integer("k", 1)
    first = values.narrow(axis, 0, count)
    return (first, indices.narrow(axis, 0, count)) if given.flag("return_indices", True) else first


def _layer_norm(given: Arguments) -> Tensor:
    x = given.tensor("x")
    axes = given.ints("axes", list(range(x.ndim)))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    normed = (x - mean) * torch.rsqrt(variance + given.number("epsilon", 1e-5))
    return _affine(normed, given.optional("gamma"), given.optional("beta"))


def _affine(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    x = x if gamma is None else x * gamma
    return x if beta is None else x + beta


def _l2_norm(given: Arguments) -> Tensor:
    x = given.tensor("x")
    squares = x.square().sum(list(range(1, x.ndim)) if x.ndim < 4 else [-3, -2, -1], keepdim=True)
    return x * torch.rsqrt(squares + given.number("epsilon", 1e-6))


def _batch_norm(given: Arguments) -> Tensor:
    x = given.tensor("x")
    shape = (1, -1, *[1] * (x.ndim - 2))

    def channels(key: str) -> Tensor | None:
        value = given.optional(key)
        return None if value is None else value.reshape(shape)

    mean, variance = (given.tensor(key).reshape(shape) for key in ("mean", "variance"))
    normed = (x - mean) * torch.rsqrt(variance + given.number("epsilon", 1e-5))
    return _affine(normed, channels("gamma"), channels("beta"))


REDUCTIONS: dict[str, Evaluation] = {
    "reduce_l1_norm": _reduce(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "reduce_l2_norm": _reduce(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "reduce_log_sum": _reduce(lambda x, axes, keep: x.sum(axes, keep).log()),
    "reduce_log_sum_exp": _reduce(lambda x, axes, keep: torch.logsumexp(x, axes, keep)),
    "reduce_max": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "reduce_mean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "reduce_min": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "reduce_prod": _reduce(_product),
    "reduce_sum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "reduce_sum_square": _reduce(lambda x, axes, keep: x.square().sum(axes, keep)),
    "reduce_argmax": _argument(torch.argmax),
    "reduce_argmin": _argument(torch.argmin),
    "argsort": lambda given: _sorted(given)[1],
    "batch_norm": _batch_norm,
    "cumsum": _cumsum,
    "l2_norm": _l2_norm,
    "layer_norm": _layer_norm,
    "softmax": lambda given: torch.softmax(given.tensor("x"), given.integer("axis", -1)),
    "topk": _topk,
}
