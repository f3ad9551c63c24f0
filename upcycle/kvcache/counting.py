"""What attention costs as exact integers: cache elements and bytes, MACs, K/V parameters.

Everything follows from an `AttentionShape`; nothing is measured and no weight is read. The letters
are those of `upcycle.attention`: H query heads, K key/value heads now, g asked for, d key and e
value head_dim, D hidden size. Every layer is counted as one that caches the whole context.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from upcycle.attention import AttentionShape
from upcycle.checkpoint.reader import CONFIG_FILE, read_config, resolve
from upcycle.errors import UpcycleError
from upcycle.families import shape_of
from upcycle.planning import check_kv_heads

AttentionKind = Literal["MHA", "GQA", "MQA"]
ShapeSource = AttentionShape | Mapping[str, Any] | str | Path


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
        `batch * length * layers * kv_heads * (head_dim + value_head_dim) * bytes_per_element`.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
        PlanError: the model cannot have that number of KV heads.
        UpcycleError: a negative count.
    """
    elements = kv_cache_elements(attention_shape(source), kv_heads, length=length, batch=batch)
    return elements * _count("bytes_per_element", bytes_per_element)


def attention_shape(source: ShapeSource) -> AttentionShape:
    """The attention of a folder, a `config.json`, a parsed config, or of a shape as it is.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
    """
    if isinstance(source, AttentionShape):
        return source
    if isinstance(source, Mapping):
        return shape_of(source)
    return shape_of(config_of(source))


def config_of(source: str | Path) -> Mapping[str, Any]:
    """The parsed config of a folder, a Hub id or a bare `config.json`; no weights are needed.

    Raises:
        CheckpointError: the config cannot be read.
    """
    path = Path(source)
    folder = path.parent if path.name == CONFIG_FILE and path.is_file() else resolve(source)
    return read_config(folder)[1]


def kv_cache_elements(
    shape: AttentionShape, kv_heads: int | None = None, *, length: int = 1, batch: int = 1
) -> int:
    """Elements of the K and V cache of all layers, `2 * L * g * length * d` where d = e."""
    heads = checked_kv_heads(shape, kv_heads)
    per_token = shape.num_layers * heads * (shape.head_dim + shape.value_head_dim)
    return per_token * _count("length", length) * _count("batch", batch)


def attention_core_macs(shape: AttentionShape, *, queries: int, keys: int, batch: int = 1) -> int:
    """Multiply-accumulates of QK^T and of weights times V in all layers, without the causal saving.

    The number of KV heads does not occur in it: every query head meets every key, shared or not.
    """
    pairs = _count("batch", batch) * _count("queries", queries) * _count("keys", keys)
    per_pair = shape.num_attention_heads * (shape.head_dim + shape.value_head_dim)
    return shape.num_layers * per_pair * pairs


def kv_projection_macs(shape: AttentionShape, kv_heads: int | None = None, *, tokens: int) -> int:
    """Multiply-accumulates of the K and V projections in all layers."""
    heads = checked_kv_heads(shape, kv_heads)
    per_token = shape.num_layers * heads * (shape.head_dim + shape.value_head_dim)
    return per_token * shape.hidden_size * _count("tokens", tokens)


def kv_projection_parameters(shape: AttentionShape, kv_heads: int | None = None) -> int:
    """Weights and biases of the K and V projections in all layers."""
    rows = checked_kv_heads(shape, kv_heads) * (shape.head_dim + shape.value_head_dim)
    return shape.num_layers * rows * (shape.hidden_size + int(shape.qkv_bias))


def parameters_saved(shape: AttentionShape, kv_heads: int) -> int:
    """K and V parameters that a conversion to `kv_heads` removes; negative where it adds some."""
    return kv_projection_parameters(shape) - kv_projection_parameters(shape, kv_heads)


def attention_kind(shape: AttentionShape, kv_heads: int) -> AttentionKind:
    """The name of attention with that many KV heads."""
    if kv_heads == shape.num_attention_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class AttentionCounts:
    """What attention with one number of KV heads costs, all layers together.

    Attributes:
        kv_heads: g.
        kind: MHA, GQA or MQA.
        cache_elements_per_token: K and V elements that each token adds to the cache.
        core_macs: QK^T and weights times V of one new token over `length` keys; the same for all g.
        projection_macs: K and V projections of one token.
        projection_parameters: K and V weights and biases.
        parameters_saved: K and V parameters fewer than now.
    """

    kv_heads: int
    kind: AttentionKind
    cache_elements_per_token: int
    core_macs: int
    projection_macs: int
    projection_parameters: int
    parameters_saved: int


def count_attention(
    shape: AttentionShape, kv_heads: int | None = None, *, length: int
) -> AttentionCounts:
    """The counts of decoding one token when `length` are in the cache, itself among them."""
    heads = checked_kv_heads(shape, kv_heads)
    return AttentionCounts(
        kv_heads=heads,
        kind=attention_kind(shape, heads),
        cache_elements_per_token=kv_cache_elements(shape, heads),
        core_macs=attention_core_macs(shape, queries=1, keys=length),
        projection_macs=kv_projection_macs(shape, heads, tokens=1),
        projection_parameters=kv_projection_parameters(shape, heads),
        parameters_saved=parameters_saved(shape, heads),
    )


def checked_kv_heads(shape: AttentionShape, kv_heads: int | None) -> int:
    """`kv_heads`, or the model's own number where it is None.

    Raises:
        PlanError: the model cannot have that many.
    """
    if kv_heads is None:
        return shape.num_key_value_heads
    check_kv_heads(shape, kv_heads, where=f"kv_heads={kv_heads}")
    return kv_heads


def _count(name: str, value: int) -> int:
    if value < 0:
        raise UpcycleError(
            f"{name} is negative: {value}", where=f"{name}={value}", fix="give 0 or more"
        )
    return value
