"""The KV cache of a program that only reads it, kept by the caller in numpy arrays.

cache = HostCache.of(manifest)
outputs = predict(cache.inputs(tokens))
cache.append(outputs)
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle.errors import ExportError
from upcycle.program.noted import ExportManifest
from upcycle.program.signature import INPUT_IDS, KEY_CACHE, MASKED, POSITION, VALUE_CACHE

_NEW_KEY = "newKey"
_NEW_VALUE = "newValue"


class HostCache:
    """K and V of all layers, with the positions that are filled so far.

    Args:
        past: by input name, K [1, g, C, d] and V [1, g, C, e] of each layer; written in place.
        windows: the program's mask inputs, and how many of the last tokens each lets see; None
            is all.

    Attributes:
        length: filled positions, which is the position of the next token.
    """

    def __init__(self, past: Mapping[str, NDArray[Any]], windows: Mapping[str, int | None]) -> None:
        self.past = past
        self.windows = windows
        self.length = 0

    @classmethod
    def of(cls, manifest: ExportManifest) -> "HostCache":
        """An empty cache for the program that a package's manifest describes."""
        shape = manifest.result.decoder
        heads = (1, shape.num_key_value_heads, manifest.options.context)
        dims = (shape.head_dim, shape.value_head_dim)
        names = past_names(shape.num_layers)
        past = {
            name: np.zeros((*heads, dims[i % 2]), dtype=np.float16) for i, name in enumerate(names)
        }
        return cls(past, shape.masks)

    @property
    def context(self) -> int:
        """C, the positions that there are."""
        return int(next(iter(self.past.values())).shape[2])

    def inputs(self, tokens: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """Everything that the program takes, to run the next tokens [1, T]. K and V by reference.

        Raises:
            ExportError: the tokens pass the end of the cache.
        """
        queries = tokens.shape[1]
        if self.length + queries > self.context:
            raise ExportError(
                f"{queries} tokens after {self.length} pass the context of {self.context}",
                where="KV cache",
                fix="start anew, or export with a longer --context",
            )
        return {
            INPUT_IDS: tokens,
            POSITION: np.array([self.length], dtype=np.int32),
            **self.past,
            **{
                name: past_mask(self.length, queries, self.context, window)
                for name, window in self.windows.items()
            },
        }

    def append(self, outputs: Mapping[str, NDArray[Any]], count: int | None = None) -> None:
        """Keep the new K and V of the program's last call.

        Args:
            outputs: of the program, [1, g, T, ..] per layer; other names are not looked at.
            count: how many of the T tokens to keep, where the others filled up the call; all by
                default.
        """
        names = new_names(len(self.past) // 2)
        kept = outputs[names[0]].shape[2] if count is None else count
        for name, past in zip(names, self.past.values(), strict=True):
            past[:, :, self.length : self.length + kept] = outputs[name][:, :, :kept]
        self.length += kept


def past_mask(
    position: int, queries: int, context: int, window: int | None = None
) -> NDArray[np.float16]:
    """The mask [1, 1, T, C] over the past of T tokens, of which the first is at `position`.

    All see the positions before the first; with a window, only the last `window` of them up to
    their own: 0 there, -4e4 else. What they see of each other is no part of it.
    """
    seen = np.arange(context)
    visible = np.broadcast_to(seen < position, (queries, context))
    if window is not None:
        visible = visible & (seen > np.arange(position, position + queries)[:, None] - window)
    return np.where(visible, 0, MASKED).astype(np.float16)[None, None]


def past_names(num_layers: int, first: int = 0) -> list[str]:
    """The inputs that hold the past: K and V of layer 0, or another first one, of layer 1, ..."""
    layers = range(first, first + num_layers)
    return [f"{name}{i}" for i in layers for name in (KEY_CACHE, VALUE_CACHE)]


def new_names(num_layers: int, first: int = 0) -> list[str]:
    """The outputs that hold the new tokens' K and V, in the same order."""
    layers = range(first, first + num_layers)
    return [f"{name}{i}" for i in layers for name in (_NEW_KEY, _NEW_VALUE)]
