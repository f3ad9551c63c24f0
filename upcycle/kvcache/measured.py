"""The size of a real cache object, to hold the counted bytes against."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache


def measured_cache_bytes(cache: "Cache") -> int:
    """Bytes of all key and value tensors that a transformers cache holds now."""
    return sum(
        tensor.nbytes
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    )
