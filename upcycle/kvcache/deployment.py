"""Where and how a model is served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from upcycle.errors import UpcycleError
from upcycle.kvcache.cache_dtype import cache_dtype

BLOCK = 16  # tokens, vLLM's default on GPUs
# vLLM's `EngineArgs.get_batch_defaults` (engine/arg_utils.py), of a server: the larger number on
# GPUs with at least 70 GiB that are no A100.
BATCHED_TOKENS, BATCHED_TOKENS_LARGE = 2048, 8192
_LARGE_GPU = 70 * 2**30


def default_batched_tokens(gpu_memory: int, device: str = "") -> int:
    """Tokens that a server computes in one step unless told otherwise.

    Args:
        gpu_memory: bytes of each GPU.
        device: its name, as far as it is known.
    """
    large = gpu_memory >= _LARGE_GPU and "a100" not in device.lower()
    return BATCHED_TOKENS_LARGE if large else BATCHED_TOKENS


@dataclass(frozen=True)
class Deployment:
    """Where and how a model is served.

    Attributes:
        gpu_memory: bytes of each GPU.
        context: tokens that every request may grow to.
        gpus: how many there are. `gpus / tensor_parallel` copies of the model share them.
        tensor_parallel: GPUs that one copy of the model is split over; all of them by default.
        kv_dtype: storage type of the cache, a name that `cache_dtype` knows.
        block: tokens of one cache block.
        reserve: bytes for activations and the runtime, over all GPUs together.
        utilization: the part of the memory that may be used.
        lengths: the weight of each length that requests have, in tokens; empty where all run to
            the full context.
        batched_tokens: tokens that a server computes in one step, which layers with a window hold
            beside it; by default what vLLM's server takes on a GPU of this memory.

    Raises:
        UpcycleError: a value that makes no sense.
    """

    gpu_memory: int
    context: int
    gpus: int = 1
    tensor_parallel: int | None = None
    kv_dtype: str = "bf16"
    block: int = BLOCK
    reserve: int = 0
    utilization: float = 1.0
    lengths: Mapping[int, int] = field(default_factory=dict)
    batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "context", "gpus", "gpus_per_copy", "block"):
            if getattr(self, name) < 1:
                raise nonsense(name, getattr(self, name), "give 1 or more")
        if self.tokens_per_step < 1:
            raise nonsense("batched_tokens", self.tokens_per_step, "give 1 or more")
        if self.reserve < 0:
            raise nonsense("reserve", self.reserve, "give 0 or more bytes")
        if not 0 < self.utilization <= 1:
            raise nonsense("utilization", self.utilization, "give a part above 0 and up to 1")
        if self.gpus % self.gpus_per_copy:
            divisors = [str(n) for n in range(1, self.gpus + 1) if self.gpus % n == 0]
            raise nonsense(
                "tensor_parallel",
                self.gpus_per_copy,
                f"{self.gpus} GPUs hold whole copies of the model with {', '.join(divisors)}",
            )
        for length, weight in self.lengths.items():
            if not 1 <= length <= self.context or weight < 1:
                raise nonsense(
                    f"lengths[{length}]",
                    weight,
                    f"give lengths from 1 to the context of {self.context:,} tokens with a "
                    "weight of 1 or more",
                )
        cache_dtype(self.kv_dtype)

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.gpus if self.tensor_parallel is None else self.tensor_parallel

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a server computes in one step."""
        if self.batched_tokens is None:
            return default_batched_tokens(self.gpu_memory)
        return self.batched_tokens

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.gpus // self.gpus_per_copy

    @property
    def usable_per_gpu(self) -> int:
        """Bytes of each GPU for weights and cache."""
        return int(self.gpu_memory * self.utilization) - -(-self.reserve // self.gpus)

    @property
    def request_lengths(self) -> Mapping[int, int]:
        """The weight of each length, also where all have the same."""
        return self.lengths or {self.context: 1}

    @property
    def tokens_wasted(self) -> float:
        """Tokens that rounding to whole blocks wastes in a request on average."""
        weights = self.request_lengths
        wasted = sum(weight * (-length % self.block) for length, weight in weights.items())
        return wasted / sum(weights.values())


def nonsense(name: str, value: float, fix: str) -> UpcycleError:
    """The error for a value that makes no sense."""
    return UpcycleError(f"{name} cannot be {value}", where=f"{name}={value}", fix=fix)


@dataclass(frozen=True)
class TensorParallel:
    """The sizes of tensor parallelism that attention can be served with, ascending.

    vLLM wants the query heads to divide by the size, and the KV heads by the size or the size by
    them (`ModelConfig.verify_with_parallel_config` and the assertions of its attention layers).

    Attributes:
        stored_once: sizes with which no GPU stores what another stores.
        copied: sizes with which several GPUs store the same KV heads.
    """

    stored_once: tuple[int, ...]
    copied: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted((*self.stored_once, *self.copied)))

    def __str__(self) -> str:
        """The sizes for people: "1, 2, 4; 8 and 16 with copies"."""
        once = _listed(self.stored_once)
        return f"{once} ({_listed(self.copied)} with copies)" if self.copied else once


def tensor_parallel(num_attention_heads: int, kv_heads: int | None) -> TensorParallel:
    """The sizes for H query heads and g KV heads; None stands for a latent, which has none."""
    sizes = [n for n in range(1, num_attention_heads + 1) if num_attention_heads % n == 0]
    stored = kv_heads or 1
    return TensorParallel(
        stored_once=tuple(n for n in sizes if stored % n == 0),
        copied=tuple(n for n in sizes if stored % n and n % stored == 0),
    )


def serving_line(num_attention_heads: int, kv_heads: int) -> str:
    """What a number of KV heads means for serving on several GPUs, as a sentence."""
    found = tensor_parallel(num_attention_heads, kv_heads)
    line = f"serves with tensor parallel {_listed(found.stored_once)}"
    if not found.copied:
        return line
    return f"{line}; with {_listed(found.copied)} GPUs hold copies of the same KV heads"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
