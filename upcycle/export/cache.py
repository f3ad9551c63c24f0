"""The KV cache of the exported program: two buffers that become its states."""

from typing import Any

import torch
from torch import Tensor


class StateCache:
    """What transformers' attention layers need of a cache, over buffers that are written in place.

    The write must be a slice assignment on every axis. With a tensor as an index
    (`buffer[layer, :, position] = key`) tracing converts without an error but drops the write, and
    with it the K and V projections.

    Args:
        keys: [L, g, C, d], written in place.
        values: [L, g, C, e], written in place.
        start: position of the first new token, a 0-d integer tensor.
    """

    def __init__(self, keys: Tensor, values: Tensor, start: Tensor) -> None:
        self.keys = keys
        self.values = values
        # `torch.export` slices only at a number that it knows; to a trace it would be a constant.
        self.start: Any = start.item() if torch.compiler.is_exporting() else start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return all of that layer's, unwritten ones too.

        Args:
            key_states: [1, g, T, d].
            value_states: [1, g, T, e].
            layer_idx: the layer.

        Returns:
            [1, g, C, d] and [1, g, C, e]; the mask hides what is not written yet.
        """
        layer = slice(layer_idx, layer_idx + 1)
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
