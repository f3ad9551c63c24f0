"""What becomes of each tensor of a source."""

from collections.abc import Mapping
from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.checkpoint.headers import TensorInfo, TensorSpec
from upcycle.checkpoint.writer import ShardLayout
from upcycle.families import Family, Role


@dataclass(frozen=True)
class Copy:
    """A tensor whose bytes go to the output as they are."""

    output: TensorSpec


@dataclass(frozen=True)
class Attention:
    """A tensor that is written anew from a layer's merged attention.

    Attributes:
        output: name, dtype and new shape.
        source_shape: the shape in the source; None where the source has no such tensor.
        layer: whose attention; that of an extra one lies behind the last layer's.
        role: which of its tensors.
    """

    output: TensorSpec
    source_shape: tuple[int, ...] | None
    layer: int
    role: Role


Operation = Copy | Attention


@dataclass(frozen=True)
class PlannedShard:
    """One output file and its tensors, in the source's order."""

    name: str
    metadata: Mapping[str, str] | None
    operations: tuple[Operation, ...]

    @property
    def layout(self) -> ShardLayout:
        """What the writer needs to know."""
        return ShardLayout(self.name, tuple(op.output for op in self.operations), self.metadata)


class OperationPlanner:
    """Turns each source tensor into its operations: a copy, or its part of a merged layer."""

    def __init__(
        self, family: Family, layers: Mapping[int, Mapping[str, Role]], target: AttentionShape
    ) -> None:
        self._roles = {
            name: (layer, role) for layer, m in layers.items() for name, role in m.items()
        }
        self._left = {layer: len(names) for layer, names in layers.items()}
        self._old_roles = {layer: set(names.values()) for layer, names in layers.items()}
        self._dtypes: dict[tuple[int, str], str] = {}
        self._family = family
        self._target = target
        self._shapes = family.tensor_shapes(target)

    def operations(self, tensor: TensorInfo) -> list[Operation]:
        """What becomes of a source tensor; with a layer's last one come those that are new."""
        if tensor.name not in self._roles:
            return [Copy(TensorSpec(tensor.name, tensor.dtype, tensor.shape))]
        layer, role = self._roles[tensor.name]
        self._dtypes[layer, role.partition(".")[0]] = tensor.dtype
        self._left[layer] -= 1
        found: list[Operation] = []
        if role in self._shapes:
            spec = TensorSpec(tensor.name, tensor.dtype, self._shapes[role])
            found.append(Attention(spec, tensor.shape, layer, role))
        if self._left[layer] == 0:
            names = self._family.tensor_names(layer, self._target)
            for new in [role for role in names if role not in self._old_roles[layer]]:
                dtype = self._dtypes[layer, new.partition(".")[0]]
                spec = TensorSpec(names[new], dtype, self._shapes[new])
                found.append(Attention(spec, None, layer, new))
        return found
