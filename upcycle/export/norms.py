"""Norms that cannot overflow fp16.

`x.pow(2)` is infinite in fp16 once |x| reaches 256, and the residual stream of real checkpoints
does: SmolLM2-135M's reaches 22,500. Its norm would then give zeros.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_SMALLEST = 2.0**-8  # smaller x are divided by it, so that ε/m² stays in fp16


class ScaledNorm(nn.Module):
    """A norm of x, computed on x/m with m the largest |x|: norm(x/m) with ε/m² is norm(x) with ε.

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
    found = [
        (parent, name, child, epsilon_name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (epsilon_name := _epsilon_of_plain_norm(child)) is not None
    ]
    for parent, name, norm, epsilon_name in found:
        setattr(parent, name, ScaledNorm(norm, epsilon_name))
    return len(found)


def _epsilon_of_plain_norm(module: Any) -> str | None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or not type(module).__name__.endswith("Norm"):
        return None
    return next((name for name in _EPSILON_NAMES if hasattr(module, name)), None)
