"""Proof, before the first step, that packed documents do not see each other.

transformers separates documents by their positions only where it gets neither a mask nor a
cache; with either, attention leaks across them without a word.
"""

import math
from typing import TYPE_CHECKING

import torch

from upcycle.errors import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (5, 11)
_TOLERANCE = 1e-3


@torch.no_grad()
def packing_leak(model: "PreTrainedModel") -> float:
    """How far a second document's logits move because of the first: relative to their spread."""
    first, second = (
        torch.arange(3, 3 + length, device=model.device)[None] % model.config.vocab_size
        for length in _LENGTHS
    )
    positions = torch.cat([torch.arange(length, device=model.device) for length in _LENGTHS])[None]
    packed = model(
        input_ids=torch.cat([first.flip(1), second], dim=1), position_ids=positions, use_cache=False
    ).logits[:, _LENGTHS[0] :]
    alone = model(input_ids=second, use_cache=False).logits
    return float((packed - alone).abs().max() / alone.float().std())


def check_isolation(model: "PreTrainedModel") -> None:
    """Run the proof.

    Raises:
        TrainingError: this model lets packed documents see each other, or computes no numbers.
    """
    leak = packing_leak(model)
    if math.isnan(leak):
        raise TrainingError(
            "its logits are not finite, or all the same",
            where=f"weights of {type(model).__name__}",
            fix="the checkpoint is damaged: fetch it or make it again",
        )
    if not leak <= _TOLERANCE:
        raise TrainingError(
            f"packed documents see each other: logits move by {leak:.1e} of their spread, "
            f"and {_TOLERANCE:.0e} is rounding",
            where=f"attention of {type(model).__name__}",
            fix="this model cannot be trained on packed rows; please report its class",
        )
