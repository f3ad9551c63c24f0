"""Rotary angles as tables.

In fp16 an angle of position 4095 is off by up to 0.98 in its cosine when it is computed in the
graph; a table computed in fp32 and stored in fp16 is within 0.0002.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class RotaryTable(nn.Module):
    """Stands in for a model's rotary embedding: looks cosines and sines up by position.

    Args:
        rotary: the embedding to tabulate, called once with all positions.
        context: C, the number of positions.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: nn.Module, context: int) -> None:
        super().__init__()
        with torch.no_grad():
            cos, sin = rotary(torch.zeros(1), torch.arange(context)[None])
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [1, T, rotary channels], for positions of shape [1, T].

        `x` only tells the embedding that this stands in for its dtype.
        """
        positions = position_ids[0]
        return self.cos.index_select(0, positions)[None], self.sin.index_select(0, positions)[None]


def tabulate_rotary(model: nn.Module, context: int) -> None:
    """Replace every rotary embedding of a model by its table over positions 0 .. context - 1.

    Raises:
        ExportError: the model has no rotary embedding, has one per layer type, or one whose
            frequencies depend on the length of the sequence.
    """
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "rotary_emb")]
    if not owners:
        raise ExportError(
            f"{type(model).__name__} has no rotary position embedding",
            where="rotary_emb",
            fix="export a decoder with rotary positions, such as Llama, Qwen2, Phi or Gemma",
        )
    for owner in owners:
        _check_rotary(model, owner.rotary_emb, context)
        owner.rotary_emb = RotaryTable(owner.rotary_emb, context)


def _check_rotary(model: nn.Module, rotary: Any, context: int) -> None:
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        raise ExportError(
            f"{type(model).__name__} has one rotary embedding per layer type",
            where="rotary_emb",
            fix="export a model whose layers share one rotary embedding",
        )
    rope_type = getattr(rotary, "rope_type", "default")
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    limit = parameters.get("original_max_position_embeddings") or rotary.original_max_seq_len
    if rope_type in _LENGTH_DEPENDENT and context > limit:
        raise ExportError(
            f"{rope_type} rotary frequencies change with the length beyond {limit} positions",
            where="config.json: rope_parameters",
            fix=f"pass --context {limit} or less",
        )
