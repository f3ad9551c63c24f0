"""Where q, k, v and o lie: in tensors of their own, or fused into one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from upcycle.attention import AttentionShape, AttentionWeights

if TYPE_CHECKING:
    from torch import Tensor

Role = str
Fields = dict[str, Any]  # of AttentionWeights


class Projections(Protocol):
    """A layout of the projections. Roles are `<module>.weight` and `<module>.bias`."""

    @property
    def output(self) -> str:
        """The module of the output projection."""

    def shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """The shape of every tensor, by its name below the attention module."""

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> Fields:
        """The fields of `AttentionWeights`, as views where the layout allows."""

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """The tensors again: the inverse of `read`."""

    def kv_weights(self) -> tuple[Role, ...]:
        """The weights that hold key and value rows."""


@dataclass(frozen=True)
class Separate:
    """One tensor for each of q, k, v and o.

    Attributes:
        output: the module of the output projection.
        gated: whether each head's rows in q are followed by as many rows of its output gate.
    """

    output: str = "o_proj"
    gated: bool = False

    def shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """See `Projections`."""
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        rows = {
            "q_proj": heads * shape.head_dim * (2 if self.gated else 1),
            "k_proj": kv_heads * shape.head_dim,
            "v_proj": kv_heads * shape.value_head_dim,
        }
        shapes: dict[Role, tuple[int, ...]] = {}
        for module, count in rows.items():
            shapes[f"{module}.weight"] = (count, shape.hidden_size)
            if shape.qkv_bias:
                shapes[f"{module}.bias"] = (count,)
        return shapes | _output_shapes(self.output, shape)

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> Fields:
        """See `Projections`."""
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        fields = {
            "q": by_head(tensors["q_proj.weight"], heads),
            "k": by_head(tensors["k_proj.weight"], kv_heads),
            "v": by_head(tensors["v_proj.weight"], kv_heads),
            "q_bias": by_head(tensors.get("q_proj.bias"), heads),
            "k_bias": by_head(tensors.get("k_proj.bias"), kv_heads),
            "v_bias": by_head(tensors.get("v_proj.bias"), kv_heads),
        }
        if self.gated:
            fields["q"], fields["gate"] = _split(fields["q"], [shape.head_dim] * 2, 1)
        return fields | _read_output(self.output, tensors, shape)

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """See `Projections`."""
        q = weights.q
        if self.gated:
            import torch

            assert weights.gate is not None
            q = torch.cat((q, weights.gate), 1)
        tensors = {
            "q_proj.weight": q.flatten(0, 1),
            "k_proj.weight": weights.k.flatten(0, 1),
            "v_proj.weight": weights.v.flatten(0, 1),
        }
        biases = {"q": weights.q_bias, "k": weights.k_bias, "v": weights.v_bias}
        for name, bias in biases.items():
            if bias is not None:
                tensors[f"{name}_proj.bias"] = bias.flatten()
        return tensors | _write_output(self.output, weights)

    def kv_weights(self) -> tuple[Role, ...]:
        """See `Projections`."""
        return ("k_proj.weight", "v_proj.weight")


@dataclass(frozen=True)
class Fused:
    """Rows of q, k and v in one tensor.

    Attributes:
        qkv: the fused module.
        output: the module of the output projection.
        per_head: while every head has a KV head of its own, whether the rows are [head][q, k, v]
            (GPT-2-like classes) and not the blocks [q | k | v] that grouped heads always are.
    """

    qkv: str = "qkv_proj"
    output: str = "o_proj"
    per_head: bool = False

    def shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """See `Projections`."""
        count = sum(self._blocks(shape))
        shapes: dict[Role, tuple[int, ...]] = {f"{self.qkv}.weight": (count, shape.hidden_size)}
        if shape.qkv_bias:
            shapes[f"{self.qkv}.bias"] = (count,)
        return shapes | _output_shapes(self.output, shape)

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> Fields:
        """See `Projections`."""
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        fields: Fields = {}
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            rows = tensors.get(f"{self.qkv}.{kind}")
            if rows is None:
                continue
            if self._is_per_head(heads, kv_heads):
                sizes = [shape.head_dim, shape.head_dim, shape.value_head_dim]
                parts = _split(by_head(rows, heads), sizes, 1)
            else:
                blocks = _split(rows, self._blocks(shape), 0)
                counts = (heads, kv_heads, kv_heads)
                parts = [by_head(b, count) for b, count in zip(blocks, counts, strict=True)]
            fields |= {name + suffix: part for name, part in zip("qkv", parts, strict=True)}
        return fields | _read_output(self.output, tensors, shape)

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """See `Projections`."""
        import torch

        per_head = self._is_per_head(weights.num_attention_heads, weights.num_key_value_heads)

        def fuse(parts: "list[Tensor]") -> "Tensor":
            if per_head:
                return torch.cat(parts, 1).flatten(0, 1)
            return torch.cat([part.flatten(0, 1) for part in parts])

        tensors = {f"{self.qkv}.weight": fuse([weights.q, weights.k, weights.v])}
        if weights.q_bias is not None and weights.k_bias is not None and weights.v_bias is not None:
            biases = [weights.q_bias, weights.k_bias, weights.v_bias]
            tensors[f"{self.qkv}.bias"] = fuse(biases)
        return tensors | _write_output(self.output, weights)

    def kv_weights(self) -> tuple[Role, ...]:
        """See `Projections`."""
        return (f"{self.qkv}.weight",)

    def _is_per_head(self, heads: int, kv_heads: int) -> bool:
        return self.per_head and heads == kv_heads

    def _blocks(self, shape: AttentionShape) -> list[int]:
        kv_heads = shape.num_key_value_heads
        return [
            shape.num_attention_heads * shape.head_dim,
            kv_heads * shape.head_dim,
            kv_heads * shape.value_head_dim,
        ]


def by_head(rows: "Tensor | None", count: int) -> Any:
    """[count * d, ...] as [count, d, ...], a view; None stays None."""
    return None if rows is None else rows.reshape(count, -1, *rows.shape[1:])


def _split(tensor: "Tensor", sizes: list[int], dim: int) -> "list[Tensor]":
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _output_shapes(module: str, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
    columns = shape.num_attention_heads * shape.value_head_dim
    shapes: dict[Role, tuple[int, ...]] = {f"{module}.weight": (shape.hidden_size, columns)}
    if shape.output_bias:
        shapes[f"{module}.bias"] = (shape.hidden_size,)
    return shapes


def _read_output(module: str, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> Fields:
    heads = (shape.hidden_size, shape.num_attention_heads, shape.value_head_dim)
    columns = tensors[f"{module}.weight"].reshape(heads)
    return {"o": columns.permute(1, 0, 2), "o_bias": tensors.get(f"{module}.bias")}


def _write_output(module: str, weights: AttentionWeights) -> dict[Role, "Tensor"]:
    tensors = {f"{module}.weight": weights.o.permute(1, 0, 2).flatten(1, 2)}
    if weights.o_bias is not None:
        tensors[f"{module}.bias"] = weights.o_bias
    return tensors
