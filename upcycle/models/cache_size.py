"""The size of a real cache object, to hold the counted bytes against."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache


def measured_cache_bytes(cache: "Cache") -> int:
    """Bytes of all key and value tensors that a transformers cache holds now.

    The states of layers without attention are not counted.
    """
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
