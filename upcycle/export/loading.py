"""Load a checkpoint for the export, or say why it cannot be exported."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from upcycle.checkpoint.loading import load_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.attention import QFOLD, register_qfold

# transformers' name for each: "eager" is the model's own attention, which repeats K and V.
IMPLEMENTATIONS = {"qfold": QFOLD, "repeat-kv": "eager"}
CONTEXT_MULTIPLE = 32  # the Neural Engine wants state dimensions in multiples of it
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def load_for_export(checkpoint: Checkpoint, attention: str, context: int) -> Any:
    """A causal LM of transformers in fp32, with one of `IMPLEMENTATIONS` as its attention.

    Raises:
        CheckpointError: transformers cannot load the model whole.
        ExportError: transformers does not know the model, or it has a feature that the exported
            program would get wrong.
    """
    _check_model_type(checkpoint)
    register_qfold()
    model = load_model(checkpoint.folder, dtype=torch.float32, attention=IMPLEMENTATIONS[attention])
    _check_layers(model, context, checkpoint.folder)
    return model


def _check_model_type(checkpoint: Checkpoint) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = checkpoint.config.get("model_type")
    where = str(checkpoint.folder / "config.json")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ExportError(
            f"model_type {model_type!r} is no causal language model of transformers",
            where=where,
            fix="export a decoder such as Llama, Mistral, Qwen2, Phi or Gemma",
        )
    if checkpoint.config.get("quantization_config"):
        raise ExportError(
            "the checkpoint is quantised", where=where, fix="export the unquantised checkpoint"
        )


def _check_layers(model: nn.Module, context: int, folder: Path) -> None:
    """Refuse what would trace without an error and decode wrongly, or not trace at all."""
    config: Any = model.config
    where = str(folder / "config.json")
    limit = getattr(config, "max_position_embeddings", context)
    if context > limit:
        raise ExportError(
            f"context {context} is more than the model's {limit} positions",
            where=f"{where}: max_position_embeddings",
            fix=_at_most(limit),
        )
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    windowed = "sliding_attention" in layer_types if layer_types else True
    if window is not None and windowed and window < context:
        raise ExportError(
            f"the model's sliding window of {window} is shorter than the context of {context}; "
            "the program has one causal mask",
            where=f"{where}: sliding_window",
            fix=_at_most(window),
        )
    if layer_types - _ATTENTION_LAYERS:
        raise ExportError(
            f"the model has layers of type {', '.join(sorted(layer_types - _ATTENTION_LAYERS))}",
            where=f"{where}: layer_types",
            fix="export a model with attention in all layers",
        )
    experts = [
        name for name, part in model.named_modules() if type(part).__name__.endswith("Experts")
    ]
    if experts:
        raise ExportError(
            f"the model has grouped experts, in {len(experts)} layers",
            where=experts[0],
            fix="export a dense model; Core ML has no operation for grouped experts",
        )


def _at_most(positions: int) -> str:
    context = positions // CONTEXT_MULTIPLE * CONTEXT_MULTIPLE
    return (
        f"pass --context {context} or less"
        if context
        else f"export a model with at least {CONTEXT_MULTIPLE} positions"
    )
