"""Additive attention masks, which the caller of an exported program makes.

A mask that is an input needs no operations of the graph, and transformers passes a ready 4-D one
on untouched.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError
from upcycle.program.signature import CAUSAL_MASK, MASKED, SLIDING_MASK

# transformers' name for the layers that take each mask.
_LAYER_TYPES = {CAUSAL_MASK: "full_attention", SLIDING_MASK: "sliding_attention"}

_SLIDING_FUNCTION = "create_sliding_window_causal_mask"  # of transformers' modeling files


def mask_windows(model: nn.Module, context: int) -> dict[str, int | None]:
    """The masks that a model's layers need over a context, and how many tokens each lets see.

    A window as long as the context hides nothing, so its layers share the causal mask.

    Returns:
        Windows by mask input; None is no window.

    Raises:
        ExportError: the model attends in chunks that are shorter than the context.
    """
    config: Any = model.config
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < context:
        raise ExportError(
            f"the model attends in chunks of {chunk} tokens, and the context is {context}",
            where="config.json: attention_chunk_size",
            fix=f"pass --context {chunk} or less",
        )
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types and hasattr(sys.modules[type(model).__module__], _SLIDING_FUNCTION):
        layer_types = {_LAYER_TYPES[SLIDING_MASK]}  # the window is that of all layers
    if window is None or window >= context or _LAYER_TYPES[SLIDING_MASK] not in layer_types:
        return {CAUSAL_MASK: None}
    windows = {CAUSAL_MASK: None, SLIDING_MASK: window}
    return {name: window for name, window in windows.items() if _LAYER_TYPES[name] in layer_types}


def masks_of_layers(
    model: nn.Module, masks: Mapping[str, int | None], layers: range
) -> dict[str, int | None]:
    """Those of a model's masks that some of its layers take."""
    if len(masks) == 1:
        return dict(masks)
    config: Any = model.config
    taken = {config.layer_types[layer] for layer in layers}
    return {name: window for name, window in masks.items() if _LAYER_TYPES[name] in taken}


def additive_mask(position: int, queries: int, context: int, window: int | None = None) -> Tensor:
    """The mask [1, 1, T, C] of tokens at `position` and the T - 1 after it.

    Each sees the positions up to its own, at most the last `window` of them: 0 there, -4e4 else.
    """
    own = torch.arange(position, position + queries)[:, None]
    seen = torch.arange(context)[None]
    visible = seen <= own
    if window is not None:
        visible &= seen > own - window
    return torch.where(visible, 0.0, MASKED)[None, None]


def masks_for_model(masks: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Masks [1, 1, T, C] by input as transformers takes them: one for all, or by layer type."""
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {_LAYER_TYPES[name]: mask for name, mask in masks.items()}
