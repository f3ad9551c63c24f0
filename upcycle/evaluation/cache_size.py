"""The KV cache of a checkpoint, counted and measured."""

from collections import Counter
from typing import Any

import torch

from upcycle.checkpoint.headers import DTYPE_BITS
from upcycle.checkpoint.reader import Checkpoint
from upcycle.evaluation.results import KVCache
from upcycle.kvcache.counting import kv_cache_bytes
from upcycle.models.generation import measured_cache_bytes

_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MEASURED_TOKENS = 16


def kv_cache_of(checkpoint: Checkpoint, model: Any) -> KVCache:
    """What one token takes in the cache: from the configuration, and in a real cache object."""
    stored = stored_dtype(checkpoint)
    element = torch.finfo(model.dtype).bits // 8
    return KVCache(
        stored_dtype=_NAMES.get(stored, stored),
        bytes_per_token=kv_cache_bytes(
            checkpoint.config, bytes_per_element=DTYPE_BITS[stored] // 8
        ),
        measured_dtype=str(model.dtype).removeprefix("torch."),
        predicted_bytes_per_token=kv_cache_bytes(checkpoint.config, bytes_per_element=element),
        measured_bytes_per_token=measured_bytes_per_token(model),
    )


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The safetensors dtype that holds most of the weights' bytes."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0]


@torch.inference_mode()
def measured_bytes_per_token(model: Any, length: int = _MEASURED_TOKENS) -> float:
    """Bytes of all key and value tensors after a forward pass over `length` tokens, per token."""
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    cache = model(input_ids=ids, use_cache=True).cache
    return measured_cache_bytes(cache) / length
