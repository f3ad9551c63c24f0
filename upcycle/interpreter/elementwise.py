"""Operations on each element."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.interpreter.arguments import Arguments, Evaluation, broadcast


def _unary(function: Callable[[Tensor], Tensor]) -> Evaluation:
    return lambda given: function(given.tensor("x"))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Evaluation:
    def evaluate(given: Arguments) -> Tensor:
        x, y = given.tensor("x"), given.tensor("y")
        if x.shape != y.shape:
            given.expect(broadcast(x, y))
        return function(x, y)

    return evaluate


def _shifted(function: Callable[[Tensor], Tensor], epsilon: float) -> Evaluation:
    """A function of x + ε."""
    return lambda given: function(given.tensor("x") + given.number("epsilon", epsilon))


def _gelu(given: Arguments) -> Tensor:
    x, mode = given.tensor("x"), given.text("mode", "EXACT")
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def _select(given: Arguments) -> Tensor:
    parts = given.stored("cond").bool(), given.stored("a"), given.stored("b")
    given.expect(broadcast(*parts))
    return torch.where(*parts)


def _softplus_parametric(given: Arguments) -> Tensor:
    x = given.tensor("x")
    shape = (1, -1, *[1] * (x.ndim - 2))
    alpha, beta = (given.tensor(key).reshape(shape) for key in ("alpha", "beta"))
    return alpha * torch.logaddexp(beta * x, torch.zeros(()))


def _with_two(function: Callable[[Tensor, float, float], Tensor]) -> Evaluation:
    """A function of x and two numbers."""
    return lambda given: function(given.tensor("x"), given.number("alpha"), given.number("beta"))


# Functions of one tensor and of two that torch calls by MIL's names.
_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.abs, torch.acos, torch.asin, torch.atan, torch.atanh, torch.ceil, torch.cos, torch.cosh,
    torch.erf, torch.exp, torch.exp2, torch.floor, torch.logical_not, torch.relu, torch.round,
    torch.sigmoid, torch.sign, torch.sin, torch.sinh, torch.sqrt, torch.square, torch.tan,
    torch.tanh, functional.relu6, functional.silu, functional.softsign,
)  # fmt: skip
_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add, torch.greater, torch.greater_equal, torch.less, torch.less_equal, torch.logical_and,
    torch.logical_or, torch.logical_xor, torch.maximum, torch.minimum, torch.mul, torch.not_equal,
    torch.pow, torch.sub,
)  # fmt: skip

ELEMENTWISE: dict[str, Evaluation] = {
    **{function.__name__: _unary(function) for function in _UNARY},
    **{function.__name__: _binary(function) for function in _BINARY},
    "softplus": _unary(lambda x: torch.logaddexp(x, torch.zeros(()))),
    "inverse": _shifted(torch.reciprocal, 1e-4),
    "log": _shifted(torch.log, 1e-45),
    "rsqrt": _shifted(torch.rsqrt, 1e-12),
    "equal": _binary(torch.eq),
    "floor_div": _binary(torch.floor_divide),
    "mod": _binary(torch.remainder),
    "real_div": _binary(torch.true_divide),
    # The declared type of the result does the rest: torch too truncates towards zero.
    "cast": lambda given: given.stored("x"),
    "clip": _with_two(torch.clamp),
    "gelu": _gelu,
    "select": _select,
    "softplus_parametric": _softplus_parametric,
    "threshold": lambda given: given.tensor("x").clamp(min=given.number("alpha")),
    "clamped_relu": _with_two(lambda x, a, b: torch.where(x >= 0, x, a * x).clamp(max=b)),
    "linear_activation": _with_two(lambda x, a, b: a * x + b),
    "scaled_tanh": _with_two(lambda x, a, b: a * torch.tanh(b * x)),
    "sigmoid_hard": _with_two(lambda x, a, b: (a * x + b).clamp(0, 1)),
    "prelu": lambda given: functional.prelu(given.tensor("x"), given.tensor("alpha").reshape(-1)),
    "elu": lambda given: functional.elu(given.tensor("x"), given.number("alpha", 1.0)),
    "leaky_relu": lambda given: functional.leaky_relu(
        given.tensor("x"), given.number("alpha", 0.01)
    ),
    "thresholded_relu": lambda given: functional.threshold(
        given.tensor("x"), math.nextafter(given.number("alpha", 1.0), -math.inf), 0.0
    ),
}
