"""A transformers causal LM as a decoder with its KV cache in buffers, ready to be traced."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError
from upcycle.export.cache import StateCache

# All but the position are the names that swift-transformers reads. Core ML states take the names
# of the buffers.
KEY_CACHE = "keyCache"
VALUE_CACHE = "valueCache"
INPUT_IDS = "inputIds"
POSITION = "position"
CAUSAL_MASK = "causalMask"
LOGITS = "logits"
MASKED = -4e4  # finite in fp16: a row of -inf would make NaN


@dataclass(frozen=True)
class DecoderShape:
    """What a decoder computes per token, found by running it once.

    Attributes:
        num_layers: L, layers that write to the KV cache.
        num_attention_heads: H.
        num_key_value_heads: g.
        head_dim: d, channels of a key head.
        value_head_dim: e, channels of a value head.
        num_linears: linear layers applied in one forward pass.
    """

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    num_linears: int


class StatefulDecoder(nn.Module):
    """One step of decoding: token and position in, logits out, K and V kept in two buffers.

    Args:
        model: a causal LM of transformers whose rotary embedding is a table.
        shape: what it writes to its cache.
        context: C, the positions that the cache holds.
    """

    def __init__(self, model: nn.Module, shape: DecoderShape, context: int) -> None:
        super().__init__()
        self.model = model
        heads = (shape.num_layers, shape.num_key_value_heads, context)
        self.register_buffer(KEY_CACHE, torch.zeros(*heads, shape.head_dim))
        self.register_buffer(VALUE_CACHE, torch.zeros(*heads, shape.value_head_dim))

    def named_states(self) -> Iterator[tuple[str, Tensor]]:
        """The two buffers that become Core ML states."""
        return ((name, self.get_buffer(name)) for name in (KEY_CACHE, VALUE_CACHE))

    def forward(self, input_ids: Tensor, position: Tensor, causal_mask: Tensor) -> Tensor:
        """Logits [1, 1, vocabulary].

        Args:
            input_ids: [1, 1], the token.
            position: [1], its position, which is also where its K and V are written.
            causal_mask: [1, 1, 1, C], added to the scores: 0 up to the position, -4e4 beyond.
        """
        keys, values = (buffer for _, buffer in self.named_states())
        cache = StateCache(keys, values, start=position[0])
        output = self.model(
            input_ids=input_ids,
            position_ids=position[None],
            attention_mask=causal_mask,
            cache=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits


def causal_mask(position: int, context: int) -> Tensor:
    """The additive mask [1, 1, 1, C] of one token: 0 for positions up to its own."""
    mask = torch.full((1, 1, 1, context), MASKED)
    mask[..., : position + 1] = 0
    return mask


def decoder_shape(model: nn.Module) -> DecoderShape:
    """Run one token through a causal LM of transformers and see what it caches.

    Raises:
        ExportError: its layers differ in their KV heads, or some keep no K and V.
    """
    recorder = _Recorder()
    linears: list[nn.Module] = []

    def count(module: nn.Module, *_: Any) -> None:
        linears.append(module)

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long),
            position_ids=torch.zeros(1, 1, dtype=torch.long),
            attention_mask=torch.zeros(1, 1, 1, 1),
            cache=recorder,
            use_cache=True,
        )
    for hook in hooks:
        hook.remove()
    config: Any = model.config
    shapes = set(recorder.layers.values())
    if len(shapes) != 1 or len(recorder.layers) != config.num_hidden_layers:
        raise ExportError(
            f"{len(recorder.layers)} of {config.num_hidden_layers} layers keep K and V, "
            f"in {len(shapes)} shapes; the export needs one shape in all layers",
            where=f"layers of {type(model).__name__}",
            fix="export a model with the same attention in all layers",
        )
    ((groups, head_dim, value_head_dim),) = shapes
    return DecoderShape(
        num_layers=len(recorder.layers),
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        num_linears=len(linears),
    )


class _Recorder:
    """A cache that keeps nothing but the shapes of each layer's K and V."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = (
            key_states.shape[1],
            key_states.shape[3],
            value_states.shape[3],
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
