"""A decoder whose KV cache stays outside: the past's K and V come in, the new tokens' go out.

The graph writes nothing in place, which is what Apple asks of programs for the Neural Engine, and
it never concatenates K or V: their scores are concatenated, and the weights split again,
softmax([q·K_pastᵀ, q·k_newᵀ]) = [a, b] gives a·V_past + b·v_new.
"""

from typing import Any

import torch
from torch import Tensor

from upcycle.export.decoder import CachedDecoder
from upcycle.export.masks import additive_mask
from upcycle.models.qfold import Segments
from upcycle.program.host_cache import new_names, past_mask, past_names
from upcycle.program.signature import Input, Signature


class ReadOnlyDecoder(CachedDecoder):
    """A decoder that takes the past's K and V of each layer and gives the new tokens'.

    Its model needs an attention of `upcycle.models.qfold`.
    """

    @property
    def past_shapes(self) -> tuple[tuple[int, ...], ...]:
        """K [1, g, C, d] and V [1, g, C, e] of each layer."""
        heads = (1, self.shape.num_key_value_heads, self.context)
        widths = (self.shape.head_dim, self.shape.value_head_dim)
        return tuple((*heads, width) for width in widths) * self.shape.num_layers

    def signature(self, queries: int) -> Signature:
        """Tokens, position, K and V of each layer and masks in, logits and new K and V out."""
        layers = (self.shape.num_layers, self.first_layer)
        named = zip(past_names(*layers), self.past_shapes, strict=True)
        return self._signature(
            queries,
            past=(Input(name, shape, "float16") for name, shape in named),
            new=new_names(*layers),
        )

    def example_inputs(self, queries: int) -> tuple[Tensor, ...]:
        """Tokens [1, T] at position [1] 0, no past, a mask of each kind, as in `signature`."""
        masks = (
            torch.from_numpy(past_mask(0, queries, self.context, window)).float()
            for window in self.masks.values()
        )
        return *self._first_tokens(queries), *map(torch.zeros, self.past_shapes), *masks

    def forward(
        self, input_ids: Tensor, position: Tensor, *past_and_masks: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [1, T, vocabulary], then K [1, g, T, d] and V [1, g, T, e] of each layer.

        The next tokens [1, T] come last where they are asked for.

        Args:
            input_ids: [1, T], the tokens.
            position: [1], of the first token.
            past_and_masks: K [1, g, C, d] and V [1, g, C, e] of each layer, K with its positions
                applied, then for each of the shape's masks `past_mask` [1, 1, T, C].
        """
        queries = input_ids.shape[1]
        count = 2 * self.shape.num_layers
        past, masks = past_and_masks[:count], past_and_masks[count:]
        whole = [
            torch.cat([mask, _mask_among_new(queries, window)], -1)
            for mask, window in zip(masks, self.masks.values(), strict=True)
        ]
        cache = PastCache(past, self.first_layer)
        logits = self._logits(input_ids, position, whole, cache)
        return logits, *cache.new, *self._next_tokens(logits)


def _mask_among_new(queries: int, window: int | None) -> Tensor:
    """What T tokens see of each other, [1, 1, T, T]: always the same, a constant of the graph."""
    return torch.tensor(additive_mask(0, queries, queries, window).tolist())


class PastCache:
    """What transformers' attention layers need of a cache, over a past that nobody writes to.

    Args:
        past: K [1, g, C, d] and V [1, g, C, e] of each layer.
        first_layer: the model's number of the first layer.

    Attributes:
        new: the K and V that `update` was given, in the same order, [1, g, T, ..] each.
    """

    def __init__(self, past: tuple[Tensor, ...], first_layer: int) -> None:
        self.past = past
        self.first_layer = first_layer
        self.new: list[Tensor] = [*past]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Segments, Segments]:
        """The past's and the new keys [1, g, T, d], and the same of the values [1, g, T, e]."""
        own = 2 * (layer_idx - self.first_layer)
        place = slice(own, own + 2)
        self.new[place] = key_states, value_states
        past_keys, past_values = self.past[place]
        return Segments(past_keys, key_states), Segments(past_values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """C: all positions are always read, and the mask says which count."""
        return self.past[0].shape[2]
