"""RMS norms that cannot overflow fp16.

`x.pow(2)` is infinite in fp16 once |x| reaches 256, and the residual stream of real checkpoints
does: SmolLM2-135M's reaches 22,500. Its norm would then give zeros.
"""

import math

import torch
from torch import Tensor, nn

_EPSILON_NAMES = ("variance_epsilon", "eps")
_LARGEST_SUM = 2.0**15  # of squares; half of what fp16 holds
_SMALLEST = 2.0**-8  # smaller x are scaled like it, so that the scale stays in fp16


class ScaledNorm(nn.Module):
    """An RMS norm of x, computed on s·x with the largest |s·x| at sqrt(2^15 / D).

    norm(x) with ε equals norm(s·x) with ε·s²; the sum of the D squares is at most 2^15.

    Args:
        norm: an RMS norm of transformers over the last axis, [.., D].
        epsilon_name: the attribute of `norm` that holds ε.
    """

    def __init__(self, norm: nn.Module, epsilon_name: str) -> None:
        super().__init__()
        self.norm = norm
        self.epsilon_name = epsilon_name
        self.epsilon = float(getattr(norm, epsilon_name))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x, [.., D]."""
        largest = x.abs().amax(-1, keepdim=True)
        target = math.sqrt(_LARGEST_SUM / int(x.shape[-1]))
        scale = target / torch.clamp(largest, min=_SMALLEST)
        # ε·s·s in this order: s² alone may overflow.
        setattr(self.norm, self.epsilon_name, self.epsilon * scale * scale)
        result: Tensor = self.norm(x * scale)
        return result


def guard_norms(model: nn.Module) -> int:
    """Replace every RMS norm below `model` by a `ScaledNorm` of it and return how many there were.

    A norm is known by its class name and its ε; a layer norm, which Core ML has an operation for,
    stays.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith("RMSNorm")
    ]
    guarded = 0
    for parent, name, norm in found:
        epsilon_name = next((e for e in _EPSILON_NAMES if hasattr(norm, e)), None)
        if epsilon_name is not None and not isinstance(norm, nn.RMSNorm):
            setattr(parent, name, ScaledNorm(norm, epsilon_name))
            guarded += 1
    return guarded
