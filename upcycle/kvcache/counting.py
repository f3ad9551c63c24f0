"""What attention costs as exact integers: cache elements and bytes, MACs, K/V parameters.

Everything follows from the configuration; nothing is measured and no weight is read. The letters
are those of `upcycle.attention`: H query heads, K key/value heads now, g asked for, d key and e
value head_dim, D hidden size; L layers with attention, n tokens.
"""

from dataclasses import dataclass, replace

from upcycle.attention import AttentionShape
from upcycle.errors import UpcycleError
from upcycle.families.latent import Latent
from upcycle.kvcache.layout import (
    AttentionKind,
    CacheLayout,
    Entry,
    ShapeSource,
    cache_layout,
)
from upcycle.planning import check_kv_heads


def kv_cache_bytes(
    source: ShapeSource,
    *,
    kv_heads: int | None = None,
    length: int = 1,
    batch: int = 1,
    bytes_per_element: int = 2,
) -> int:
    """Bytes of the K and V cache of all layers.

    Args:
        source: a checkpoint folder, its `config.json`, the parsed config, or an `AttentionShape`.
        kv_heads: the number of KV heads to count with; the model's own by default.
        length: cached tokens of each sequence.
        batch: sequences.
        bytes_per_element: 2 for fp16 and bf16, 1 for fp8.

    Returns:
        `batch * tokens * kv_heads * (head_dim + value_head_dim) * bytes_per_element`, where tokens
        are those in the caches of all layers: `length` in each that sees the whole context, the
        latest `window - 1` in one with a window. With multi-head latent attention the latent counts
        in place of the heads.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
        PlanError: the model cannot have that number of KV heads.
        UpcycleError: a negative count.
    """
    elements = kv_cache_elements(source, kv_heads, length=length, batch=batch)
    return elements * _count("bytes_per_element", bytes_per_element)


def kv_cache_elements(
    source: ShapeSource, kv_heads: int | None = None, *, length: int = 1, batch: int = 1
) -> int:
    """Elements of the K and V cache of all layers, see `kv_cache_bytes`.

    Raises:
        UpcycleError: a negative count.
    """
    layout = cache_layout(source)
    tokens = layout.cached_tokens(_count("length", length)) * _count("batch", batch)
    return layout.entry(kv_heads).elements * tokens


def kv_projection_parameters(shape: AttentionShape, kv_heads: int | None = None) -> int:
    """Weights and biases of the K and V projections in all layers."""
    return _kv_rows(shape, kv_heads) * (shape.hidden_size + int(shape.qkv_bias))


def parameters_saved(shape: AttentionShape, kv_heads: int) -> int:
    """K and V parameters that a conversion to `kv_heads` removes; negative where it adds some."""
    return kv_projection_parameters(shape) - kv_projection_parameters(shape, kv_heads)


@dataclass(frozen=True)
class AttentionCounts:
    """What one kind of attention costs, all layers of one sequence together.

    Bytes are those of the attention itself in a fused kernel (Dao et al. 2022, "FlashAttention"):
    queries in and outputs out once, the cache read once, new keys and values written once.
    Intensities are floating-point operations, two a MAC, for each of these bytes; a device computes
    hundreds while it reads one.

    Attributes:
        kv_heads: g; None for MLA, which has none.
        kind: MHA, GQA, MQA or MLA.
        elements_per_token_and_layer: K and V elements, or those of the latent.
        cache_elements: after `length` tokens.
        core_macs: QK^T and weights times V of the token at position `length`; the same for all g.
        projection_macs: K and V projections of one token.
        projection_parameters: K and V weights and biases.
        parameters_saved: K and V parameters fewer than now.
        decode_bytes: moved for the token at position `length`.
        decode_intensity: of it; H / g for large lengths in 2-byte elements.
        prefill_macs: QK^T and weights times V of `length` tokens under the causal mask.
        prefill_bytes: moved for them.
        prefill_intensity: of it.
    """

    kv_heads: int | None
    kind: AttentionKind
    elements_per_token_and_layer: int
    cache_elements: int
    core_macs: int
    projection_macs: int
    projection_parameters: int
    parameters_saved: int
    decode_bytes: int
    decode_intensity: float
    prefill_macs: int
    prefill_bytes: int
    prefill_intensity: float


def count_attention(
    source: ShapeSource, *, length: int, bytes_per_element: int = 2
) -> tuple[AttentionCounts, ...]:
    """The model as it is and every other number of KV heads, most heads first.

    Args:
        source: what to count, see `cache_layout`.
        length: tokens of the prefill, and of the context that a decode step meets.
        bytes_per_element: of queries, outputs and cache.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
        UpcycleError: `length` or `bytes_per_element` is below 1.
    """
    layout = cache_layout(source)
    for name, value in (("length", length), ("bytes_per_element", bytes_per_element)):
        if value < 1:
            raise UpcycleError(f"{name} is {value}", where=f"{name}={value}", fix="give 1 or more")
    return tuple(_counts(layout, entry, length, bytes_per_element) for entry in layout.entries)


def latent_reference(layout: CacheLayout) -> CacheLayout:
    """The same model with the latent that DeepSeek-V2 gives to heads of this size.

    DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.4: d_c = 4 d and d_R = d / 2. No conversion makes
    one; it stands beside the others for comparison.
    """
    latent = Latent(rank=4 * layout.shape.head_dim, rope_dim=layout.shape.head_dim // 2)
    wider = replace(layout.shape, head_dim=layout.shape.head_dim + latent.rope_dim)
    return replace(layout, shape=wider, latent=latent)


def _counts(layout: CacheLayout, entry: Entry, length: int, width: int) -> AttentionCounts:
    shape, latent = layout.shape, layout.latent if entry.kind == "MLA" else None
    heads, per_head = shape.num_attention_heads, shape.head_dim + shape.value_head_dim
    # With the up-projection absorbed into queries and outputs, heads attend to the latent itself.
    decode_head = per_head if latent is None else latent.elements + latent.rank
    keys, tokens = layout.attended_keys(length), shape.num_layers * length
    core = heads * decode_head * keys
    queries_and_outputs = heads * decode_head * shape.num_layers
    decode = width * (queries_and_outputs + entry.elements * (keys + shape.num_layers))
    pairs = layout.causal_pairs(length)
    # A prefill writes the latent, and the keys and values that it expands to, and reads those.
    expanded = 2 * heads * per_head + entry.elements if latent else 2 * entry.elements
    prefill = width * tokens * (heads * per_head + expanded)
    parameters = _projection_parameters(layout, entry)
    biases = 0 if latent else shape.num_layers * entry.elements * int(shape.qkv_bias)
    return AttentionCounts(
        kv_heads=entry.kv_heads,
        kind=entry.kind,
        elements_per_token_and_layer=entry.elements,
        cache_elements=entry.elements * layout.cached_tokens(length),
        core_macs=core,
        projection_macs=parameters - biases,
        projection_parameters=parameters,
        parameters_saved=_projection_parameters(layout, layout.now) - parameters,
        decode_bytes=decode,
        decode_intensity=2 * core / decode,
        prefill_macs=heads * per_head * pairs,
        prefill_bytes=prefill,
        prefill_intensity=2 * heads * per_head * pairs / prefill,
    )


def _projection_parameters(layout: CacheLayout, entry: Entry) -> int:
    """Of K and V: straight from the hidden state, or down to the latent and up to the heads."""
    shape, latent = layout.shape, layout.latent
    if entry.kv_heads is not None or latent is None:
        return kv_projection_parameters(shape, entry.kv_heads)
    unrotated = shape.head_dim - latent.rope_dim + shape.value_head_dim
    up = latent.rank * shape.num_attention_heads * unrotated
    return shape.num_layers * (shape.hidden_size * latent.elements + up)


def _kv_rows(shape: AttentionShape, kv_heads: int | None) -> int:
    heads = shape.num_key_value_heads if kv_heads is None else kv_heads
    check_kv_heads(shape, heads, where=f"kv_heads={heads}")
    return shape.num_layers * heads * (shape.head_dim + shape.value_head_dim)


def _count(name: str, value: int) -> int:
    if value < 0:
        raise UpcycleError(
            f"{name} is negative: {value}", where=f"{name}={value}", fix="give 0 or more"
        )
    return value
