"""What a checkpoint is and what a conversion of it would save, from its headers and config."""

from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.checkpoint.headers import DTYPE_BITS
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families import shape_of
from upcycle.families.retargets.rules import target_config
from upcycle.kvcache.cache_dtype import cache_dtype, is_auto
from upcycle.kvcache.counting import AttentionCounts, count_attention, latent_reference
from upcycle.kvcache.deployment import BATCHED_TOKENS, BLOCK, TensorParallel, tensor_parallel
from upcycle.kvcache.layout import AttentionKind, CacheLayout, attention_kind, cache_layout
from upcycle.kvcache.recommendation import nothing_to_merge
from upcycle.kvcache.weights import bytes_by_dtype, kv_element_dtype
from upcycle.planning import planned_sizes

REFERENCE_LENGTH = 4096


@dataclass(frozen=True)
class Choice:
    """The model with one number of KV heads.

    Attributes:
        kv_heads: g.
        kind: MHA, GQA or MQA.
        kv_bytes_per_token: of cache that a token adds in all layers, while every window has room.
        cache_bytes_saved: fewer than now in the cache of one sequence of `REFERENCE_LENGTH` tokens;
            negative where there would be more.
        weight_bytes_saved: fewer than now in the weights that a conversion writes; negative where a
            class that the model becomes first has more biases, or a wider dtype, than are saved.
        tensor_parallel: the sizes that it can be served with.
    """

    kv_heads: int
    kind: AttentionKind
    kv_bytes_per_token: int
    cache_bytes_saved: int
    weight_bytes_saved: int
    tensor_parallel: TensorParallel


@dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance.

    Attributes:
        model_type: what it is.
        loads_as: the model type after a conversion; another one where its class cannot share heads.
        shape: its attention.
        kind: of its attention now.
        num_parameters: elements of all stored tensors; tied tensors count once.
        weight_bytes: bytes of all stored tensors.
        bytes_by_dtype: the same by safetensors dtype, the largest first.
        kv_bytes_per_element: of the K projections.
        kv_dtype: of the cache; that of the K projections unless asked otherwise.
        cache_bytes: of one sequence of `REFERENCE_LENGTH` tokens, as transformers caches it.
        batched_tokens: tokens that a server computes in one step.
        reserved_bytes: what such a server sets aside for a sequence of `REFERENCE_LENGTH` tokens,
            in whole blocks; more than `cache_bytes` where layers see a window.
        nothing_to_merge: why there are no fewer KV heads to have, if so.
        extra_attention: the paths of attentions outside the decoder's layers with as many KV heads,
            each with the reason why it cannot be converted like a layer, if there is one.
        window_layers: how many layers see a window of the context alone.
        state_elements: what layers without attention keep for each sequence, however long.
        choices: one for each number of KV heads that it can be converted to, most heads first.
        counts: what each of them costs at `REFERENCE_LENGTH` tokens.
        latent_counts: the same of a model of this size with multi-head latent attention, for
            comparison; no conversion makes one.
    """

    model_type: str
    loads_as: str
    shape: AttentionShape
    kind: AttentionKind
    num_parameters: int
    weight_bytes: int
    bytes_by_dtype: dict[str, int]
    kv_bytes_per_element: int
    kv_dtype: str
    cache_bytes: int
    batched_tokens: int
    reserved_bytes: int
    nothing_to_merge: str | None
    extra_attention: dict[str, str | None]
    window_layers: int
    state_elements: int
    choices: tuple[Choice, ...]
    counts: tuple[AttentionCounts, ...]
    latent_counts: AttentionCounts

    @property
    def now(self) -> Choice:
        """The model as it is."""
        return next(c for c in self.choices if c.kv_heads == self.shape.num_key_value_heads)


def inspect_checkpoint(
    checkpoint: Checkpoint, *, kv_dtype: str | None = None, batched_tokens: int | None = None
) -> Inspection:
    """Describe a checkpoint without reading a weight.

    Args:
        checkpoint: what to describe.
        kv_dtype: of the cache, a name that `cache_dtype` knows; that of the K projections by
            default, and for "auto".
        batched_tokens: tokens that a server computes in one step; 2,048 by default.

    Raises:
        CheckpointError: the attention tensors contradict the config.
        FamilyError: the model's attention is not supported, or its weights are quantised.
    """
    stored = kv_element_dtype(checkpoint)  # with a refusal where they do not fit
    shape, layout = shape_of(checkpoint.config), cache_layout(checkpoint.config)
    width = DTYPE_BITS[stored] // 8
    sizes = planned_sizes(checkpoint)
    cached = cache_dtype(stored if kv_dtype is None or is_auto(kv_dtype) else kv_dtype)
    step = BATCHED_TOKENS if batched_tokens is None else batched_tokens

    def token(kv_heads: int) -> int:
        """Bytes that a token leaves in one layer."""
        return kv_heads * cached.bytes_per_head(layout.entry(kv_heads))

    def cache(kv_heads: int, length: int) -> int:
        return token(kv_heads) * layout.cached_tokens(length)

    cache_now = cache(shape.num_key_value_heads, REFERENCE_LENGTH)

    def choice(kv_heads: int) -> Choice:
        return Choice(
            kv_heads=kv_heads,
            kind=attention_kind(shape, kv_heads),
            kv_bytes_per_token=cache(kv_heads, 1),
            cache_bytes_saved=cache_now - cache(kv_heads, REFERENCE_LENGTH),
            weight_bytes_saved=checkpoint.weight_bytes - sizes.output_bytes[kv_heads],
            tensor_parallel=tensor_parallel(shape.num_attention_heads, kv_heads),
        )

    def counts(of: CacheLayout) -> tuple[AttentionCounts, ...]:
        return count_attention(of, length=REFERENCE_LENGTH, bytes_per_element=width)

    return Inspection(
        model_type=checkpoint.config["model_type"],
        loads_as=target_config(checkpoint.config)["model_type"],
        shape=shape,
        kind=attention_kind(shape, shape.num_key_value_heads),
        num_parameters=checkpoint.num_parameters,
        weight_bytes=checkpoint.weight_bytes,
        bytes_by_dtype=bytes_by_dtype(checkpoint),
        kv_bytes_per_element=width,
        kv_dtype=cached.name,
        cache_bytes=cache_now,
        extra_attention={extra.module: extra.problem for extra in sizes.extra},
        batched_tokens=step,
        reserved_bytes=token(shape.num_key_value_heads)
        * BLOCK
        * layout.reserved_blocks(REFERENCE_LENGTH, BLOCK, step),
        nothing_to_merge=nothing_to_merge(shape),
        window_layers=sum(window is not None for window in layout.windows),
        state_elements=layout.state_elements,
        choices=tuple(choice(kv_heads) for kv_heads in reversed(shape.valid_kv_heads)),
        counts=counts(layout),
        latent_counts=counts(latent_reference(layout))[0],
    )
