"""Where the norms of queries and keys lie, and how their weights belong to heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upcycle.attention import AttentionShape, AttentionWeights, QkNorm
from upcycle.families.projections import Fields, Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NormTensors:
    """The tensors of a family's q/k norm.

    Attributes:
        norm: what it computes; its `eps` comes from the configuration.
        eps_key: the configuration key of eps.
        when: the configuration key that switches the norm on, or None where it is always there.
        query: the module of the query norm, or None for a norm without weights.
        key: the module of the key norm.
        each_head: whether every head's weight is a tensor of its own, `<module>.norms.<head>`.
        bias: whether there is a bias too.
    """

    norm: QkNorm
    eps_key: str = "rms_norm_eps"
    when: str | None = None
    query: str | None = "q_norm"
    key: str | None = "k_norm"
    each_head: bool = False
    bias: bool = False

    def shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """The shape of every tensor, by its name below the attention module."""
        shapes: dict[Role, tuple[int, ...]] = {}
        if self.query is None or self.key is None:
            return shapes
        counts = {self.query: shape.num_attention_heads, self.key: shape.num_key_value_heads}
        for module, heads in counts.items():
            if self.each_head:
                shapes |= {
                    f"{module}.norms.{head}.weight": (shape.head_dim,) for head in range(heads)
                }
                continue
            per_span = {
                "shared": (shape.head_dim,),
                "head": (heads, shape.head_dim),
                "all": (heads * shape.head_dim,),
            }
            shapes[f"{module}.weight"] = per_span[self.norm.span]
            if self.bias:
                shapes[f"{module}.bias"] = per_span[self.norm.span]
        return shapes

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> Fields:
        """The fields of `AttentionWeights`: weights [d], or [heads, d] as the span says."""
        if self.query is None or self.key is None:
            return {}
        return {
            "q_norm": self._read(tensors, self.query, shape.num_attention_heads),
            "k_norm": self._read(tensors, self.key, shape.num_key_value_heads),
            "q_norm_bias": tensors.get(f"{self.query}.bias"),
            "k_norm_bias": tensors.get(f"{self.key}.bias"),
        }

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """The tensors again: the inverse of `read`."""
        tensors: dict[Role, Tensor] = {}
        pairs = (
            (self.query, weights.q_norm, weights.q_norm_bias),
            (self.key, weights.k_norm, weights.k_norm_bias),
        )
        for module, weight, bias in pairs:
            if weight is None:
                continue
            if self.each_head:
                tensors |= {f"{module}.norms.{i}.weight": row for i, row in enumerate(weight)}
            else:
                flat = weight.flatten() if self.norm.span == "all" else weight
                tensors[f"{module}.weight"] = flat
            if bias is not None:
                tensors[f"{module}.bias"] = bias
        return tensors

    def _read(self, tensors: Mapping[Role, "Tensor"], module: str, heads: int) -> "Tensor":
        if self.each_head:
            import torch

            return torch.stack([tensors[f"{module}.norms.{head}.weight"] for head in range(heads)])
        weight = tensors[f"{module}.weight"]
        return weight.reshape(heads, -1) if self.norm.span == "all" else weight
