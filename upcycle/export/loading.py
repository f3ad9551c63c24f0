"""Load a checkpoint as a decoder to export, or say why it cannot be exported."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.checks import check_agreement
from upcycle.export.decoder import as_tuple, decoder_shape
from upcycle.export.experts import use_dense_experts
from upcycle.export.layers import guard_norms, split_output_head, use_convolutions
from upcycle.export.quantize.weights import is_tied, untie
from upcycle.export.read_only import ReadOnlyDecoder
from upcycle.export.residual import fit_residual
from upcycle.export.rotary import tabulate_rotary
from upcycle.export.stateful import StatefulDecoder
from upcycle.models.loading import load_model, quiet
from upcycle.models.qfold import register_attention_forms
from upcycle.options.export import CONTEXT_MULTIPLE, READ_ONLY, STATE, ExportOptions
from upcycle.program.values import LARGEST_FP16

DECODERS: dict[str, Any] = {STATE: StatefulDecoder, READ_ONLY: ReadOnlyDecoder}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_COMPARED = 8  # tokens
_TOLERANCE = 1e-3  # of the range of the logits
_SUCH_AS = "export a decoder such as Llama, Mistral, Qwen2, Phi or Gemma"
# What classes raise that are no decoders, or compute attention in their own way.
_UNRUNNABLE = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def load_decoder(checkpoint: Checkpoint, options: ExportOptions) -> Any:
    """A checkpoint's model in fp32 as a decoder that can be traced; its `shape` is measured.

    Args:
        checkpoint: the checkpoint.
        options: what is asked of it.

    Raises:
        CheckpointError: transformers cannot load the model whole.
        ExportError: transformers does not know the model, or it has a feature that the exported
            program would get wrong.
    """
    _check_model_type(checkpoint)
    register_attention_forms()
    model = load_model(checkpoint.folder, dtype=torch.float32, attention="eager")
    _check_layers(model, options.context, checkpoint.folder)
    _check_numbers(model, math.inf, checkpoint.folder)
    try:
        with torch.no_grad():
            expected = model(_compared_tokens(model)).logits
        if options.chunk_size is not None and is_tied(model):
            untie(model)  # the first and the last chunk have a constant of it each
        _adapt(model, options.context, options.attention)
        _check_numbers(model, LARGEST_FP16, checkpoint.folder)
        if options.split_head > 1:
            split_output_head(model, options.split_head)
        if options.conv:
            use_convolutions(model)
        decoder = DECODERS[options.kv_cache](
            model, decoder_shape(model, options.context), options.context, argmax=options.argmax
        ).eval()
        _check_agreement(decoder, expected)
        return decoder
    except _UNRUNNABLE as error:
        raise ExportError(
            f"the model does not run as a decoder with a fixed cache: {type(error).__name__}: "
            f"{' '.join(str(error).split())}",
            where=type(model).__name__,
            fix=_SUCH_AS,
        ) from error


def _compared_tokens(model: Any) -> Tensor:
    vocabulary: int = model.config.vocab_size
    return torch.arange(_COMPARED)[None] * 7919 % vocabulary


def _adapt(model: Any, context: int, attention: str) -> None:
    """Give a model the attention, experts, angles and norms of the export."""
    with quiet():
        model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        raise ExportError(
            "the model does not leave attention to transformers' interface",
            where=type(model).__name__,
            fix=_SUCH_AS,
        )
    use_dense_experts(model)
    tabulate_rotary(model, context)
    guard_norms(model)
    fit_residual(model, _compared_tokens(model))


def _check_agreement(decoder: Any, expected: Tensor) -> None:
    """Refuse a model that is another one as a decoder, whatever it is that makes it so."""
    _, *others = decoder.example_inputs(_COMPARED)
    with torch.no_grad():
        found = decoder(_compared_tokens(decoder.model).int(), *others)
    check_agreement(
        as_tuple(found)[0],
        expected,
        tolerance=_TOLERANCE,
        what="the model in the form of the export",
        where=type(decoder.model).__name__,
        fix=_SUCH_AS,
    )


def _check_model_type(checkpoint: Checkpoint) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = checkpoint.config.get("model_type")
    where = str(checkpoint.folder / "config.json")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ExportError(
            f"model_type {model_type!r} is not a causal language model of transformers",
            where=where,
            fix=_SUCH_AS,
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
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - _ATTENTION_LAYERS:
        raise ExportError(
            f"the model has layers of type {', '.join(sorted(layer_types - _ATTENTION_LAYERS))}",
            where=f"{where}: layer_types",
            fix="export a model with attention in all layers",
        )


def _check_numbers(model: nn.Module, largest: float, folder: Path) -> None:
    """Refuse a weight whose numbers would be none in the program."""
    for name, parameter in model.named_parameters():
        magnitude = max(map(abs, map(float, parameter.detach().aminmax())))  # NaN if it holds one
        if not magnitude <= largest or math.isinf(magnitude):
            raise ExportError(
                f"{name} has numbers up to {magnitude:,g}, and fp16 ends at {LARGEST_FP16:,}"
                if math.isfinite(magnitude)
                else f"{name} holds NaN or infinite numbers",
                where=str(folder),
                fix="export a checkpoint whose weights are finite in fp16",
            )


def _at_most(positions: int) -> str:
    context = positions // CONTEXT_MULTIPLE * CONTEXT_MULTIPLE
    return (
        f"pass --context {context} or less"
        if context
        else f"export a model with at least {CONTEXT_MULTIPLE} positions"
    )
