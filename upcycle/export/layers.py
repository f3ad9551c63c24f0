"""Layers of a model in other forms that compute the same: norms for fp16, convolutions."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_SMALLEST = 2.0**-8  # smaller x are divided by it, so that ε/m² stays in fp16
_Module = TypeVar("_Module", bound=nn.Module)


def replace_modules(
    model: nn.Module, made_of: Callable[[nn.Module], _Module | None]
) -> list[_Module]:
    """Replace modules below a model by what is made of them, and return what was made.

    Args:
        model: changed in place.
        made_of: what to put in a module's place; None leaves the module.
    """
    places = [
        (parent, name, made)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (made := made_of(child)) is not None
    ]
    for parent, name, made in places:
        setattr(parent, name, made)
    return [made for *_, made in places]


class ScaledNorm(nn.Module):
    """A norm of x, computed on x/m with m the largest |x|: norm(x/m) with ε/m² is norm(x) with ε.

    So it cannot overflow fp16. `x.pow(2)` is infinite there once |x| reaches 256, and the residual
    stream of real checkpoints does: SmolLM2-135M's reaches 22,500. Its norm would then give zeros.

    Args:
        norm: a norm of transformers over the last axis, [.., D], with or without the mean's
            subtraction.
        epsilon_name: the attribute of `norm` that holds ε.
    """

    def __init__(self, norm: nn.Module, epsilon_name: str) -> None:
        super().__init__()
        self.norm = norm
        self.epsilon_name = epsilon_name
        self.eps = float(getattr(norm, epsilon_name))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x, [.., D]."""
        largest = torch.clamp(x.abs().amax(-1, keepdim=True), min=_SMALLEST)
        # ε/m² as (√ε/m)²: m² may be more than fp16 holds. A number over a tensor would be traced
        # as two operations.
        root = torch.div(torch.tensor(math.sqrt(self.eps), dtype=x.dtype), largest)
        setattr(self.norm, self.epsilon_name, root * root)
        result: Tensor = self.norm(x / largest)
        setattr(self.norm, self.epsilon_name, self.eps)
        return result


def guard_norms(model: nn.Module) -> int:
    """Replace every norm below `model` by a `ScaledNorm` of it and return how many there were.

    A norm is known by its class name and its ε; torch's own, which Core ML has an operation for or
    scales itself, stay.
    """
    return len(replace_modules(model, _guarded))


def _guarded(module: nn.Module) -> ScaledNorm | None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or not type(module).__name__.endswith("Norm"):
        return None
    name = next((name for name in _EPSILON_NAMES if hasattr(module, name)), None)
    return None if name is None else ScaledNorm(module, name)


class PointwiseConv(nn.Module):
    """A linear layer as a 1x1 convolution over [1, channels, 1, T], the engine's own layout.

    Args:
        linear: [D] to [E]; its weights are shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight[:, :, None, None])
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[.., E] of x, [.., D]."""
        columns = x.reshape(1, -1, x.shape[-1]).transpose(1, 2)[:, :, None]
        result = nn.functional.conv2d(columns, self.weight, self.bias)
        return result[:, :, 0].transpose(1, 2).reshape(*x.shape[:-1], -1)


class SplitLinear(nn.Module):
    """A linear layer as several with a part of the outputs each.

    Args:
        linear: [D] to [E]; its weights are shared.
        parts: how many, at most E; as equal as can be.
    """

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        weights = linear.weight.tensor_split(parts)
        biases = [None] * parts if linear.bias is None else linear.bias.tensor_split(parts)
        self.parts = nn.ModuleList(map(_linear, weights, biases))

    def forward(self, x: Tensor) -> Tensor:
        """[.., E] of x, [.., D]."""
        return torch.cat([part(x) for part in self.parts], -1)


def use_convolutions(model: Any) -> None:
    """Make every plain linear layer of a causal LM a convolution.

    An output head that shares the embedding's table stays: as a convolution it would have one of
    its own.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def convolution(module: nn.Module) -> PointwiseConv | None:
        if type(module) is nn.Linear and id(module.weight) not in tables:
            return PointwiseConv(module)
        return None

    replace_modules(model, convolution)


def split_output_head(model: Any, parts: int) -> None:
    """Split the output head of a causal LM; one that shares the embedding's table gets its own.

    Raises:
        ExportError: it has fewer rows than parts.
    """
    head = model.get_output_embeddings()
    if parts > len(head.weight):
        raise ExportError(
            f"an output head of {len(head.weight)} rows cannot have {parts} parts",
            where="--split-head",
            fix=f"pass {len(head.weight)} or less, or omit it",
        )
    model.set_output_embeddings(SplitLinear(head, parts))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
