"""What a checkpoint is and what a conversion of it would save, from its headers and config."""

from collections import Counter
from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families import shape_of
from upcycle.families.retargets.rules import target_config
from upcycle.kvcache.counting import AttentionKind, attention_kind, kv_cache_bytes
from upcycle.kvcache.weights import Weights, kv_element_bytes

REFERENCE_LENGTH = 4096


@dataclass(frozen=True)
class Choice:
    """The model with one number of KV heads.

    Attributes:
        kv_heads: g.
        kind: MHA, GQA or MQA.
        kv_bytes_per_token: cache of one token in all layers.
        cache_bytes_saved: fewer than now in the cache of one sequence of `REFERENCE_LENGTH` tokens;
            negative where there would be more.
        weight_bytes_saved: fewer than now in the weights.
    """

    kv_heads: int
    kind: AttentionKind
    kv_bytes_per_token: int
    cache_bytes_saved: int
    weight_bytes_saved: int


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
        kv_bytes_per_element: of the cache, which has the dtype of the K projections.
        choices: one for each number of KV heads that it can be converted to, most heads first.
    """

    model_type: str
    loads_as: str
    shape: AttentionShape
    kind: AttentionKind
    num_parameters: int
    weight_bytes: int
    bytes_by_dtype: dict[str, int]
    kv_bytes_per_element: int
    choices: tuple[Choice, ...]

    @property
    def now(self) -> Choice:
        """The model as it is."""
        return next(c for c in self.choices if c.kv_heads == self.shape.num_key_value_heads)


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Describe a checkpoint without reading a weight.

    Raises:
        CheckpointError: the attention tensors contradict the config.
        FamilyError: the model's attention is not supported, or its weights are quantised.
    """
    shape = shape_of(checkpoint.config)
    width = kv_element_bytes(checkpoint)
    weights = Weights(checkpoint.weight_bytes, width)
    bytes_now = kv_cache_bytes(shape, bytes_per_element=width)

    def choice(kv_heads: int) -> Choice:
        per_token = kv_cache_bytes(shape, kv_heads=kv_heads, bytes_per_element=width)
        return Choice(
            kv_heads=kv_heads,
            kind=attention_kind(shape, kv_heads),
            kv_bytes_per_token=per_token,
            cache_bytes_saved=(bytes_now - per_token) * REFERENCE_LENGTH,
            weight_bytes_saved=weights.total_bytes - weights.bytes_with(shape, kv_heads),
        )

    by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        by_dtype[tensor.dtype] += tensor.nbytes
    valid = shape.valid_kv_heads
    return Inspection(
        model_type=checkpoint.config["model_type"],
        loads_as=target_config(checkpoint.config)["model_type"],
        shape=shape,
        kind=attention_kind(shape, shape.num_key_value_heads),
        num_parameters=checkpoint.num_parameters,
        weight_bytes=checkpoint.weight_bytes,
        bytes_by_dtype=dict(by_dtype.most_common()),
        kv_bytes_per_element=width,
        choices=tuple(choice(kv_heads) for kv_heads in reversed(valid)),
    )
