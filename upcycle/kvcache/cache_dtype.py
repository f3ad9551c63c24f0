"""How many bytes a cached K and V vector takes in each cache dtype, scales included."""

from dataclasses import dataclass

from upcycle.errors import UpcycleError
from upcycle.kvcache.layout import Entry


@dataclass(frozen=True)
class CacheDtype:
    """A storage type of the KV cache.

    Attributes:
        name: what users call it.
        bits: of one element; elements narrower than a byte are packed within their vector.
        scale_bytes: beside each K vector and each V vector of one token and head.
    """

    name: str
    bits: int
    scale_bytes: int = 0

    def bytes_per_head(self, entry: Entry) -> int:
        """Bytes of both vectors that one token leaves in one layer, for one head."""
        return sum(
            -(-width * self.bits // 8) + self.scale_bytes
            for width in (entry.key_width, entry.value_width)
        )


# fp8 has one static scale per tensor, which takes no room; the integer types have one fp32 scale
# per token and head for K and one for V (vLLM's per-token-head modes, v1/kv_cache_interface.py).
CACHE_DTYPES = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("bf16", 16),
        CacheDtype("fp16", 16),
        CacheDtype("fp8", 8),
        CacheDtype("int8", 8, scale_bytes=4),
        CacheDtype("int4", 4, scale_bytes=4),
    )
}


def cache_dtype(name: str) -> CacheDtype:
    """The cache dtype of that name.

    Raises:
        UpcycleError: there is none.
    """
    if name not in CACHE_DTYPES:
        raise UpcycleError(
            f"unknown KV cache dtype {name!r}",
            where="kv dtype",
            fix=f"choose one of {', '.join(CACHE_DTYPES)}",
        )
    return CACHE_DTYPES[name]
