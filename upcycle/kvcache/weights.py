"""How many bytes of weights a model has now, and with another number of KV heads."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from upcycle.attention import AttentionShape
from upcycle.checkpoint.headers import DTYPE_BITS
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families import caches_latent, family_in
from upcycle.families.implied import shape_in
from upcycle.families.retargets.view import RetargetedCheckpoint, retargeted
from upcycle.kvcache.counting import kv_projection_parameters, parameters_saved
from upcycle.planning import planned_sizes


@dataclass(frozen=True)
class Weights:
    """The weights of one copy of a model.

    Attributes:
        total_bytes: all of them, with the KV heads that the model has now.
        kv_bytes_per_element: of the K and V projections. None where only the total is known; then
            the weights are taken to be the same for every number of KV heads.
        converted: bytes after a conversion, by the number of KV heads, as `planned_sizes` counts
            them; where there are none, the K and V projections alone change.
    """

    total_bytes: int
    kv_bytes_per_element: int | None = None
    converted: Mapping[int, int] = field(default_factory=dict)

    def kv_bytes(self, shape: AttentionShape, kv_heads: int) -> int:
        """Bytes of the K and V projections, 0 where their dtype is not known."""
        if len(self.converted) > 1:  # what a KV head adds is all that differs
            (fewer, small), *_, (more, large) = sorted(self.converted.items())
            return (large - small) // (more - fewer) * kv_heads
        return kv_projection_parameters(shape, kv_heads) * (self.kv_bytes_per_element or 0)

    def bytes_with(self, shape: AttentionShape, kv_heads: int) -> int:
        """Bytes of all weights with `kv_heads`: as stored for the model's own, else converted."""
        if kv_heads != shape.num_key_value_heads and kv_heads in self.converted:
            return self.converted[kv_heads]
        saved = parameters_saved(shape, kv_heads) * (self.kv_bytes_per_element or 0)
        return self.total_bytes - saved

    def bytes_per_gpu(
        self, shape: AttentionShape, kv_heads: int, kv_heads_per_gpu: int, tensor_parallel: int
    ) -> int:
        """Bytes on each GPU of a tensor-parallel group.

        All weights are split evenly, except that each GPU holds the K and V rows of its own heads,
        also where several GPUs hold the same head.
        """
        split = self.bytes_with(shape, kv_heads) - self.kv_bytes(shape, kv_heads)
        kv_of_one_head = self.kv_bytes(shape, kv_heads) // kv_heads
        return -(-split // tensor_parallel) + kv_of_one_head * kv_heads_per_gpu


def kv_element_dtype(checkpoint: Checkpoint) -> str:
    """The safetensors dtype of the K projections, the first layer's standing for all.

    Raises:
        CheckpointError: the attention tensors contradict the config.
        FamilyError: the model's attention is not supported, or its weights are quantised.
    """
    view = retargeted(checkpoint)
    family = family_in(view)
    shape = shape_in(view)
    planned_sizes(view)  # checks every attention tensor
    role = family.projections.kv_weights()[0]
    name = family.tensor_names(shape.attention_layers[0], shape)[role]
    if isinstance(view, RetargetedCheckpoint):
        name = view.made[name].sources[0].name
    return checkpoint.tensors[name].dtype


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The weights of a checkpoint, from its headers.

    A model with a latent cannot be converted, so that only the total matters.

    Raises:
        CheckpointError: the attention tensors contradict the config.
        FamilyError: the model's attention is not supported, or its weights are quantised.
    """
    if caches_latent(checkpoint.config):
        return Weights(checkpoint.weight_bytes)
    sizes = planned_sizes(checkpoint).output_bytes
    width = DTYPE_BITS[kv_element_dtype(checkpoint)] // 8
    return Weights(checkpoint.weight_bytes, width, sizes)


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of all stored tensors by safetensors dtype, the largest first."""
    found: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        found[tensor.dtype] += tensor.nbytes
    return dict(found.most_common())
