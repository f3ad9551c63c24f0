"""How much memory a model needs to write text of its own."""

from upcycle.checkpoint.reader import Checkpoint
from upcycle.kvcache.counting import kv_cache_bytes

AT_ONCE = 16  # sequences
LONGEST = 1024  # tokens of a chat of two turns
_ELEMENT = 4  # bytes of a cache's element, and of a logit, at most
_COPIES = 3  # of the logits: themselves, their probabilities, and what is drawn from


def sampling_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that a model needs to write text: all weights, and a batch's cache and logits.

    `weights + 16 * cache of 1,024 tokens in fp32 + 16 * vocabulary * 4 * 3`, the vocabulary being
    at most the longest matrix.

    Raises:
        FamilyError: the model's attention is not supported.
    """
    cache = kv_cache_bytes(
        checkpoint.config, length=LONGEST, batch=AT_ONCE, bytes_per_element=_ELEMENT
    )
    shapes = [tensor.shape for tensor in checkpoint.tensors.values()]
    vocabulary = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    return checkpoint.weight_bytes + cache + AT_ONCE * vocabulary * _ELEMENT * _COPIES
