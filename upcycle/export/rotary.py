"""Rotary angles as tables.

In fp16 an angle of position 4095 is off by up to 0.98 in its cosine when it is computed in the
graph; a table computed in fp32 and stored in fp16 is within 0.0002.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError

# Their frequencies change once the sequence is longer than the model was first trained for.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class RotaryTable(nn.Module):
    """Stands in for a model's rotary embedding: looks cosines and sines up by position.

    Args:
        tables: cosines and sines, each [C, rotary channels], by layer type; None where all layers
            share them.
    """

    def __init__(self, tables: Mapping[str | None, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for layer_type, (cos, sin) in tables.items():
            self.register_buffer(f"cos_{layer_type}", cos)
            self.register_buffer(f"sin_{layer_type}", sin)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [1, T, rotary channels], for positions of shape [1, T].

        `x` only tells the embedding that this stands in for its dtype.
        """
        cos, sin = (
            self.get_buffer(f"{name}_{layer_type}").index_select(0, position_ids[0])[None]
            for name in ("cos", "sin")
        )
        return cos, sin


def tabulate_rotary(model: nn.Module, context: int) -> None:
    """Replace every rotary embedding of a model by its table over positions 0 .. context - 1.

    Raises:
        ExportError: the frequencies of one depend on the length of the sequence, or it gives no
            cosines and sines.
    """
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "rotary_emb")]
    tables: dict[Any, RotaryTable] = {}  # layers may share one
    for owner in owners:
        rotary = owner.rotary_emb
        if rotary not in tables:
            tables[rotary] = _tabulate(rotary, context)
        owner.rotary_emb = tables[rotary]


def _tabulate(rotary: Any, context: int) -> RotaryTable:
    _check_lengths(rotary, context)
    by_layer_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    tables: dict[str | None, tuple[Tensor, Tensor]] = {}
    # A layer type without rotary positions has no parameters.
    for layer_type in rotary.rope_type if by_layer_type else [None]:
        arguments = (torch.zeros(1), torch.arange(context)[None])
        with torch.no_grad():
            made = rotary(*arguments, layer_type) if by_layer_type else rotary(*arguments)
        if not isinstance(made, tuple):
            raise ExportError(
                f"{type(rotary).__name__} gives no cosines and sines",
                where="rotary_emb",
                fix="export a decoder with real rotary positions, such as Llama, Qwen2 or Gemma",
            )
        tables[layer_type] = (made[0][0], made[1][0])
    return RotaryTable(tables)


def _check_lengths(rotary: Any, context: int) -> None:
    """Refuse frequencies that would change within the context."""
    types = getattr(rotary, "rope_type", "default")
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    for layer_type, rope_type in (types if isinstance(types, dict) else {None: types}).items():
        own = parameters[layer_type] if layer_type is not None else parameters
        limit = own.get("original_max_position_embeddings") or rotary.original_max_seq_len
        if rope_type in _LENGTH_DEPENDENT and context > limit:
            raise ExportError(
                f"{rope_type} rotary frequencies change with the length beyond {limit} positions",
                where="config.json: rope_parameters",
                fix=f"pass --context {limit} or less",
            )
