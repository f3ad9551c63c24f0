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


ELEMENTWISE: dict[str, Evaluation] = {
    "abs": _unary(torch.abs),
    "acos": _unary(torch.acos),
    "asin": _unary(torch.asin),
    "atan": _unary(torch.atan),
    "atanh": _unary(torch.atanh),
    "ceil": _unary(torch.ceil),
    "cos": _unary(torch.cos),
    "cosh": _unary(torch.cosh),
    "erf": _unary(torch.erf),
    "exp": _unary(torch.exp),
    "exp2": _unary(torch.exp2),
    "floor": _unary(torch.floor),
    "logical_not": _unary(torch.logical_not),
    "relu": _unary(torch.relu),
    "relu6": _unary(functional.relu6),
    "round": _unary(torch.round),
    "sigmoid": _unary(torch.sigmoid),
    "sign": _unary(torch.sign),
    "silu": _unary(functional.silu),
    "sin": _unary(torch.sin),
    "sinh": _unary(torch.sinh),
    "softplus": _unary(lambda x: torch.logaddexp(x, torch.zeros(()))),
    "softsign": _unary(functional.softsign),
    "sqrt": _unary(torch.sqrt),
    "square": _unary(torch.square),
    "tan": _unary(torch.tan),
    "tanh": _unary(torch.tanh),
    "inverse": _shifted(torch.reciprocal, 1e-4),
    "log": _shifted(torch.log, 1e-45),
    "rsqrt": _shifted(torch.rsqrt, 1e-12),
    "add": _binary(torch.add),
    "equal": _binary(torch.eq),
    "floor_div": _binary(torch.floor_divide),
    "greater": _binary(torch.gt),
    "greater_equal": _binary(torch.ge),
    "less": _binary(torch.lt),
    "less_equal": _binary(torch.le),
    "logical_and": _binary(torch.logical_and),
    "logical_or": _binary(torch.logical_or),
    "logical_xor": _binary(torch.logical_xor),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "mod": _binary(torch.remainder),
    "mul": _binary(torch.mul),
    "not_equal": _binary(torch.ne),
    "pow": _binary(torch.pow),
    "real_div": _binary(torch.true_divide),
    "sub": _binary(torch.sub),
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
