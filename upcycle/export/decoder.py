"""A transformers causal LM as a decoder with its KV cache in buffers, ready to be traced."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from upcycle.errors import ExportError
from upcycle.export.masks import mask_windows, masks_for_model
from upcycle.models.qfold import Call, recorded_calls
from upcycle.program.noted import DecoderShape
from upcycle.program.signature import (
    INPUT_IDS,
    LOGITS,
    NEXT_TOKEN,
    POSITION,
    Input,
    Signature,
)


class CachedDecoder(nn.Module):
    """T tokens and the position of the first in, logits out; subclasses say where K and V are.

    Args:
        model: a causal LM of transformers whose rotary embedding is a table.
        shape: what it writes to its cache.
        context: C, the positions that the cache holds.
        argmax: whether to give the likeliest next token of each position too.
        first_layer: the model's number of the first layer that writes to its cache.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: DecoderShape,
        context: int,
        *,
        argmax: bool = False,
        first_layer: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.shape = shape
        self.context = context
        self.argmax = argmax
        self.first_layer = first_layer
        self.masks = shape.masks

    def _signature(
        self,
        queries: int,
        *,
        past: Iterable[Input] = (),
        new: Iterable[str] = (),
        states: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Signature:
        return Signature(
            inputs=(
                Input(INPUT_IDS, (1, queries), "int32"),
                Input(POSITION, (1,), "int32"),
                *past,
                *(Input(name, (1, 1, queries, self.context), "float16") for name in self.masks),
            ),
            outputs=(LOGITS, *new, *([NEXT_TOKEN] if self.argmax else [])),
            states=states or {},
        )

    def _logits(
        self, input_ids: Tensor, position: Tensor, masks: Iterable[Tensor], cache: Any
    ) -> Tensor:
        """Run the model: logits [1, T, vocabulary]."""
        output = self.model(
            input_ids=input_ids,
            position_ids=_positions(position, input_ids.shape[1]),
            attention_mask=masks_for_model(dict(zip(self.masks, masks, strict=True))),
            cache=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits

    def _first_tokens(self, queries: int) -> tuple[Tensor, Tensor]:
        """T tokens and their position, which is 0."""
        return torch.zeros(1, queries, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def _next_tokens(self, logits: Tensor) -> tuple[Tensor, ...]:
        """The likeliest token of each position, [1, T] int32, where it is asked for."""
        return (logits.argmax(-1).int(),) if self.argmax else ()


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a decoder gives, logits first."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _positions(first: Tensor, queries: int) -> Tensor:
    """Positions [1, T] of T tokens, of which the first has position [1]."""
    if queries == 1:
        return first[None]
    return (first + torch.arange(queries, dtype=torch.int32))[None]


def decoder_shape(model: nn.Module, context: int) -> DecoderShape:
    """Run one token through a causal LM of transformers and see what it caches.

    Args:
        model: in the form that will be traced.
        context: C, which decides whether a sliding window needs a mask of its own.

    Raises:
        ExportError: its layers differ in their KV heads, some keep no K and V, or attend to other
            ones than they keep, or the model is not told the positions of its tokens.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"{type(model).__name__} takes no position_ids: its positions, such as ALiBi's, "
            "follow from the length of a mask",
            where="forward",
            fix="export a model with rotary or learned positions, such as Llama, Qwen2 or GPT-2",
        )
    config: Any = model.config
    recorder = _Recorder()
    with (
        torch.no_grad(),
        recorded_calls(config._attn_implementation) as calls,
        CountLinears() as count,
    ):
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long),
            position_ids=torch.zeros(1, 1, dtype=torch.long),
            attention_mask=torch.zeros(1, 1, 1, 1),
            cache=recorder,
            use_cache=True,
        )
    shapes = set(recorder.layers.values())
    if len(shapes) != 1 or len(recorder.layers) != config.num_hidden_layers:
        raise ExportError(
            f"{len(recorder.layers)} of {config.num_hidden_layers} layers keep K and V, "
            f"in {len(shapes)} shapes; the export needs one shape in all layers",
            where=f"layers of {type(model).__name__}",
            fix="export a model with the same attention in all layers",
        )
    _check_calls(model, calls, recorder)
    ((groups, head_dim, value_head_dim),) = shapes
    return DecoderShape(
        num_layers=len(recorder.layers),
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        num_linears=count.linears,
        masks=mask_windows(model, context),
    )


def _check_calls(model: nn.Module, calls: Sequence[Call], recorder: "_Recorder") -> None:
    """Refuse layers that attend twice, by code of their own, or to what their cache is made into.

    Such programs would copy K and V, which no export here does.
    """
    layers = len(recorder.layers)
    kept = {id(tensor) for pair in recorder.kept for tensor in pair}
    others = [call for call in calls if not {id(call.key), id(call.value)} <= kept]
    problem = None
    if len(calls) != layers:
        problem = (
            f"{len(calls)} calls of attention in {layers} layers; the export needs one in each"
        )
    elif others:
        problem = "layers attend to other keys or values than they keep, and would copy the cache"
    if problem is not None:
        raise ExportError(
            problem,
            where=others[0].layer if others else type(model).__name__,
            fix="export a model with plain attention over its cache, such as Llama or Qwen2",
        )


class CountLinears(TorchFunctionMode):
    """Counts what becomes a `linear` or `conv`: modules, and functions of bare weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linears += func in (nn.functional.linear, torch.conv2d)
        return func(*args, **(kwargs or {}))


class _Recorder:
    """A cache that keeps nothing but the shapes of each layer's K and V."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.kept: list[tuple[Tensor, Tensor]] = []  # alive, so that their ids stay theirs

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = (
            key_states.shape[1],
            key_states.shape[3],
            value_states.shape[3],
        )
        self.kept.append((key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
