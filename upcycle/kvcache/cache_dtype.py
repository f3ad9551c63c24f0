"""How many bytes a cached K and V vector takes in each cache dtype, scales included."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.errors import UpcycleError
from upcycle.kvcache.layout import Entry


@dataclass(frozen=True)
class CacheDtype:
    """A storage type of the KV cache.

    Attributes:
        name: what we call it.
        bits: of one element; elements narrower than a byte are packed within their vector.
        scale_bytes: beside each K vector and each V vector of one token and head.
        spellings: what torch, safetensors, vLLM, SGLang and llama.cpp call it.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    spellings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: "2 bytes an element (bf16)"."""
        scales = ", and scales" if self.scale_bytes else ""
        return f"{self.bits / 8:g} bytes an element{scales} ({self.name})"

    def bytes_per_head(self, entry: Entry) -> int:
        """Bytes of both vectors that one token leaves in one layer, for one head."""
        return sum(
            -(-width * self.bits // 8) + self.scale_bytes
            for width in (entry.key_width, entry.value_width)
        )


_FP8 = tuple(
    f"{prefix}{kind}"
    for prefix in ("", "f8_", "fp8_", "float8_")
    for kind in ("e4m3", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
)

# fp8 has one static scale per tensor, which takes no room; the integer types and
# fp8_per_token_head have one fp32 scale per token and head for K and one for V (vLLM's
# per-token-head modes, v1/kv_cache_interface.py).
CACHE_DTYPES = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("bf16", 16, spellings=("bfloat16",)),
        CacheDtype("fp16", 16, spellings=("float16", "f16", "half")),
        CacheDtype("fp32", 32, spellings=("float32", "f32", "float")),
        CacheDtype("fp64", 64, spellings=("float64", "f64", "double")),
        CacheDtype("fp8", 8, spellings=("f8", "float8", "fp8_inc", *_FP8)),
        CacheDtype("fp8_per_token_head", 8, scale_bytes=4),
        CacheDtype("int8", 8, scale_bytes=4, spellings=("i8", "int8_per_token_head")),
        CacheDtype("int4", 4, scale_bytes=4, spellings=("i4", "int4_per_token_head")),
    )
}
_CHOICES = (
    f"choose one of {', '.join(CACHE_DTYPES)}, or a usual spelling of one, such as float16 or "
    "fp8_e4m3, or auto for the model's own"
)
_BY_SPELLING = {
    spelling: dtype
    for dtype in CACHE_DTYPES.values()
    for spelling in (dtype.name, *dtype.spellings)
}


def cache_dtype(name: str, *, where: str = "--kv-dtype") -> CacheDtype:
    """The cache dtype of that name, in any usual spelling: "bf16", "torch.bfloat16", "FP8-E4M3".

    Args:
        name: of the dtype.
        where: what it was given as, for the error.

    Raises:
        UpcycleError: there is none.
    """
    found = _BY_SPELLING.get(name.strip().lower().replace("-", "_").removeprefix("torch."))
    if found is None:
        raise UpcycleError(f"unknown KV cache dtype {name!r}", where=where, fix=_CHOICES)
    return found


def asked_dtype(name: str, config: Callable[[], Mapping[str, Any]]) -> CacheDtype:
    """The cache dtype that `--kv-dtype` names, where "auto" is the model's own, as for servers.

    Args:
        name: as given.
        config: the raw `config.json`, whose `dtype` is looked at for "auto" alone.

    Raises:
        UpcycleError: there is none of that name, or the configuration names none.
    """
    if not is_auto(name):
        return cache_dtype(name)
    found = config()
    for part in (found, found.get("text_config")):
        if isinstance(part, Mapping) and (own := part.get("dtype", part.get("torch_dtype"))):
            return cache_dtype(str(own), where="--kv-dtype auto: dtype in config.json")
    raise UpcycleError(
        "config.json names no dtype, which the KV cache could have too",
        where="--kv-dtype auto: dtype in config.json",
        fix=_CHOICES,
    )


def is_auto(name: str) -> bool:
    """Whether a name asks for the model's own dtype."""
    return name.strip().lower() == "auto"
