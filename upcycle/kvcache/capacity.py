"""How many requests fit on a set of GPUs, for every number of KV heads a model can have.

The model is that of a paged server (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention"): what the weights and the reserve leave of the memory
is cut into blocks of tokens, and every request takes whole blocks up to its full context. Under
tensor parallelism the KV heads are split over the GPUs; with fewer heads than GPUs each GPU still
holds one, so heads are stored more than once.
"""

from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.errors import UpcycleError
from upcycle.kvcache.cache_dtype import CacheDtype, cache_dtype
from upcycle.kvcache.counting import AttentionKind, attention_kind
from upcycle.kvcache.weights import Weights


@dataclass(frozen=True)
class Deployment:
    """Where and how a model is served.

    Attributes:
        gpu_memory: bytes of each GPU.
        context: tokens that every request may grow to.
        gpus: how many there are. `gpus / tensor_parallel` copies of the model share them.
        tensor_parallel: GPUs that one copy of the model is split over; all of them by default.
        kv_dtype: storage type of the cache, a name in `CACHE_DTYPES`.
        block: tokens of one cache block.
        reserve: bytes for activations and the runtime, over all GPUs together.
        utilization: the part of the memory that may be used.

    Raises:
        UpcycleError: a value that makes no sense.
    """

    gpu_memory: int
    context: int
    gpus: int = 1
    tensor_parallel: int | None = None
    kv_dtype: str = "bf16"
    block: int = 16
    reserve: int = 0
    utilization: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "context", "gpus", "gpus_per_copy", "block"):
            if getattr(self, name) < 1:
                raise _nonsense(name, getattr(self, name), "give 1 or more")
        if self.reserve < 0:
            raise _nonsense("reserve", self.reserve, "give 0 or more bytes")
        if not 0 < self.utilization <= 1:
            raise _nonsense("utilization", self.utilization, "give a part above 0 and up to 1")
        if self.gpus % self.gpus_per_copy:
            divisors = [str(n) for n in range(1, self.gpus + 1) if self.gpus % n == 0]
            raise _nonsense(
                "tensor_parallel",
                self.gpus_per_copy,
                f"{self.gpus} GPUs hold whole copies of the model with {', '.join(divisors)}",
            )
        cache_dtype(self.kv_dtype)

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.gpus if self.tensor_parallel is None else self.tensor_parallel

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.gpus // self.gpus_per_copy

    @property
    def usable_per_gpu(self) -> int:
        """Bytes of each GPU for weights and cache."""
        return int(self.gpu_memory * self.utilization) - -(-self.reserve // self.gpus)

    @property
    def blocks_per_request(self) -> int:
        """Cache blocks of a request at its full context."""
        return -(-self.context // self.block)


@dataclass(frozen=True)
class Fit:
    """What fits with one number of KV heads.

    Attributes:
        kv_heads: g.
        kind: MHA, GQA or MQA.
        kv_heads_per_gpu: KV heads that each GPU stores.
        splits_evenly: whether the heads divide over the GPUs of a copy, or the GPUs over the heads.
        kv_bytes_per_token: stored for one token on all GPUs of a copy together.
        weight_bytes: weights of one copy on all its GPUs together.
        free_per_gpu: bytes that weights and reserve leave for the cache; negative if they overflow.
        cache_tokens: tokens that all copies can cache.
        concurrency: requests at full context that their cache holds, with the broken part.
        requests: whole requests at full context.
        decode_step_bytes: that all GPUs read for one new token of each of `batch` requests at full
            context: the weights of every copy once, and the cache of every request.
        warning: what is wasted or counted with a caveat.
    """

    kv_heads: int
    kind: AttentionKind
    kv_heads_per_gpu: int
    splits_evenly: bool
    kv_bytes_per_token: int
    weight_bytes: int
    free_per_gpu: int
    cache_tokens: int
    concurrency: float
    requests: int
    decode_step_bytes: int
    warning: str | None


def fit_requests(
    shape: AttentionShape, weights: Weights, deployment: Deployment, *, batch: int = 1
) -> tuple[Fit, ...]:
    """What fits for each number of KV heads that the model can have, most heads first.

    Args:
        shape: the model's attention.
        weights: the model's weights.
        deployment: the GPUs and how they are used.
        batch: requests that are decoded together over all copies, for `decode_step_bytes`; it
            may be more than fit.

    Raises:
        UpcycleError: the query heads do not split over the GPUs, or the batch is below 1.
    """
    split = deployment.gpus_per_copy
    if shape.num_attention_heads % split:
        divisors = [str(n) for n in range(1, split) if shape.num_attention_heads % n == 0]
        raise _nonsense(
            "tensor_parallel",
            split,
            f"the {shape.num_attention_heads} query heads split over {', '.join(divisors)} GPUs",
        )
    if batch < 1:
        raise _nonsense("batch", batch, "give 1 or more")
    choices = shape.valid_kv_heads
    dtype = cache_dtype(deployment.kv_dtype)
    return tuple(_fit(shape, weights, deployment, dtype, g, batch) for g in reversed(choices))


def _fit(
    shape: AttentionShape,
    weights: Weights,
    deployment: Deployment,
    dtype: CacheDtype,
    kv_heads: int,
    batch: int,
) -> Fit:
    split = deployment.gpus_per_copy
    per_gpu = max(1, kv_heads // split)
    weights_per_gpu = weights.bytes_per_gpu(shape, kv_heads, per_gpu, split)
    free = deployment.usable_per_gpu - weights_per_gpu
    token_on_gpu = shape.num_layers * per_gpu * dtype.bytes_per_token_and_head(shape)
    blocks = max(0, free) // (token_on_gpu * deployment.block)
    stored_per_token = token_on_gpu * split
    stored_weights = weights_per_gpu * split
    return Fit(
        kv_heads=kv_heads,
        kind=attention_kind(shape, kv_heads),
        kv_heads_per_gpu=per_gpu,
        splits_evenly=kv_heads % split == 0 or split % kv_heads == 0,
        kv_bytes_per_token=stored_per_token,
        weight_bytes=stored_weights,
        free_per_gpu=free,
        cache_tokens=blocks * deployment.block * deployment.copies,
        concurrency=blocks / deployment.blocks_per_request * deployment.copies,
        requests=blocks // deployment.blocks_per_request * deployment.copies,
        decode_step_bytes=stored_weights * deployment.copies
        + batch * deployment.context * stored_per_token,
        warning=_warning(kv_heads, split),
    )


def _warning(kv_heads: int, split: int) -> str | None:
    if kv_heads % split == 0:
        return None
    if split % kv_heads == 0:
        return f"g={kv_heads}: each KV head is stored on {split // kv_heads} GPUs"
    if kv_heads > split:
        return f"g={kv_heads} does not divide by {split} GPUs; counted as {kv_heads // split} a GPU"
    return f"g={kv_heads} does not divide {split} GPUs; counted as one head a GPU"


def _nonsense(name: str, value: float, fix: str) -> UpcycleError:
    return UpcycleError(f"{name} cannot be {value}", where=f"{name}={value}", fix=fix)
