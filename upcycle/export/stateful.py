"""A decoder whose KV cache lies in two buffers, which become the states of the program."""

from typing import Any

import torch
from torch import Tensor, nn

from upcycle.export.decoder import CachedDecoder
from upcycle.export.masks import additive_mask
from upcycle.program.noted import DecoderShape
from upcycle.program.signature import KEY_CACHE, VALUE_CACHE, Signature


class StateCache:
    """What transformers' attention layers need of a cache, over buffers that are written in place.

    The write must be a slice assignment on every axis. With a tensor as an index
    (`buffer[layer, :, position] = key`) tracing converts without an error but drops the write, and
    with it the K and V projections.

    Args:
        keys: [L, g, C, d], written in place.
        values: [L, g, C, e], written in place.
        start: position of the first new token, a 0-d integer tensor.
        first_layer: the model's number of the first layer.
    """

    def __init__(self, keys: Tensor, values: Tensor, start: Tensor, first_layer: int) -> None:
        self.keys = keys
        self.values = values
        self.first_layer = first_layer
        # `torch.export` slices only at a number that it knows; to a trace it would be a constant.
        self.start: Any = start.item() if torch.compiler.is_exporting() else start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return all of that layer's, unwritten ones too.

        Args:
            key_states: [1, g, T, d].
            value_states: [1, g, T, e].
            layer_idx: the model's number of the layer.

        Returns:
            [1, g, C, d] and [1, g, C, e]; the mask hides what is not written yet.
        """
        own = layer_idx - self.first_layer
        layer = slice(own, own + 1)
        stop = self.start + key_states.shape[2]
        if torch.compiler.is_exporting():
            check: Any = torch._check
            check(self.start >= 0)
            check(stop <= self.keys.shape[2])
        new = slice(self.start, stop)
        self.keys[layer, :, new, :] = key_states
        self.values[layer, :, new, :] = value_states
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The capacity C: all positions are always read, and the mask says which count."""
        return self.keys.shape[2]


class StatefulDecoder(CachedDecoder):
    """A decoder that keeps K and V in two buffers, [L, g, C, d] and [L, g, C, e]."""

    def __init__(self, model: nn.Module, shape: DecoderShape, context: int, **others: Any) -> None:
        super().__init__(model, shape, context, **others)
        heads = (shape.num_layers, shape.num_key_value_heads, context)
        self.register_buffer(KEY_CACHE, torch.zeros(*heads, shape.head_dim))
        self.register_buffer(VALUE_CACHE, torch.zeros(*heads, shape.value_head_dim))

    def signature(self, queries: int) -> Signature:
        """Tokens, position and masks in, logits out, the two buffers as states."""
        names = (KEY_CACHE, VALUE_CACHE)
        return self._signature(
            queries, states={name: tuple(self.get_buffer(name).shape) for name in names}
        )

    def example_inputs(self, queries: int) -> tuple[Tensor, ...]:
        """Tokens [1, T] at position [1] 0, and a mask [1, 1, T, C] of each kind."""
        masks = (additive_mask(0, queries, self.context, window) for window in self.masks.values())
        return *self._first_tokens(queries), *masks

    def forward(
        self, input_ids: Tensor, position: Tensor, *masks: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Logits [1, T, vocabulary], with the next tokens [1, T] where they are asked for.

        Args:
            input_ids: [1, T], the tokens.
            position: [1], of the first token, which is also where their K and V are written;
                position + T must not pass C.
            masks: for each of the shape's masks [1, 1, T, C], of `additive_mask`.
        """
        keys, values = self.get_buffer(KEY_CACHE), self.get_buffer(VALUE_CACHE)
        cache = StateCache(keys, values, position[0], self.first_layer)
        logits = self._logits(input_ids, position, masks, cache)
        return (logits, *self._next_tokens(logits)) if self.argmax else logits
