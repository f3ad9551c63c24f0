"""Everything that a conversion will do, as plain data, before any weight is read."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from upcycle.attention import AttentionShape, valid_kv_heads
from upcycle.checkpoint.headers import TensorInfo, TensorSpec
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.writer import ShardLayout
from upcycle.errors import CheckpointError, FamilyError, PlanError
from upcycle.families import Family, Role, family_of

# Buffers that old checkpoints store beside the projections; no head is in them.
_ATTENTION_BUFFERS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Copy:
    """A tensor whose bytes go to the output as they are."""

    output: TensorSpec


@dataclass(frozen=True)
class Attention:
    """A tensor that is written anew from a layer's merged attention.

    Attributes:
        output: name, dtype and new shape.
        source_shape: the shape in the source.
        layer: whose attention.
        role: which of its tensors.
    """

    output: TensorSpec
    source_shape: tuple[int, ...]
    layer: int
    role: Role


Operation = Copy | Attention


@dataclass(frozen=True)
class PlannedShard:
    """One output file and its tensors, in the order of the source's file of the same name."""

    name: str
    metadata: Mapping[str, str] | None
    operations: tuple[Operation, ...]

    @property
    def layout(self) -> ShardLayout:
        """What the writer needs to know."""
        return ShardLayout(self.name, tuple(op.output for op in self.operations), self.metadata)


@dataclass(frozen=True)
class Plan:
    """A conversion as data.

    Attributes:
        model_type: the family's name.
        source_shape: the attention's numbers now.
        num_key_value_heads: g.
        method: how groups are merged; for g ≥ K nothing is merged and it is not used.
        seed: for methods that draw.
        initializer_range: the source class's initial scale.
        shards: the output files.
        config_edits: the keys of `config.json` that change.
        peak_bytes: the most tensor memory that is needed at once, in fp64.
    """

    model_type: str
    source_shape: AttentionShape
    num_key_value_heads: int
    method: str
    seed: int
    initializer_range: float
    shards: tuple[PlannedShard, ...]
    config_edits: Mapping[str, Any]
    peak_bytes: int

    @property
    def operations(self) -> list[Operation]:
        """All operations in the order of writing."""
        return [operation for shard in self.shards for operation in shard.operations]

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(operation.output.nbytes for operation in self.operations)

    @property
    def target_shape(self) -> AttentionShape:
        """The attention's numbers after conversion."""
        return replace(self.source_shape, num_key_value_heads=self.num_key_value_heads)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-serialisable data."""
        return {**asdict(self), "output_bytes": self.output_bytes}


def plan(
    source: str | Path | Checkpoint, *, kv_heads: int, method: str = "mean", seed: int = 0
) -> Plan:
    """Plan a conversion from headers and configuration alone.

    Args:
        source: a checkpoint folder, a Hub id, or an opened checkpoint.
        kv_heads: g. Divisors of K merge (K itself copies every tensor); multiples of K that
            divide H repeat KV heads, which is exact.
        method: a registered merge method.
        seed: for methods that draw.

    Raises:
        CheckpointError: the checkpoint is damaged, or its shapes contradict its configuration.
        FamilyError: the model has no KV heads that can be merged.
        PlanError: `kv_heads` is not possible.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    family = family_of(checkpoint.config)
    shape = family.shape(checkpoint.config)
    check_kv_heads(shape, kv_heads)
    roles = _attention_tensors(checkpoint, family, shape)
    target = replace(shape, num_key_value_heads=kv_heads)
    merges = kv_heads != shape.num_key_value_heads
    new_shapes = family.tensor_shapes(target)

    def operation(tensor: TensorInfo) -> Operation:
        spec = TensorSpec(tensor.name, tensor.dtype, tensor.shape)
        if not merges or tensor.name not in roles:
            return Copy(spec)
        layer, role = roles[tensor.name]
        return Attention(replace(spec, shape=new_shapes[role]), tensor.shape, layer, role)

    shards = tuple(
        PlannedShard(header.path.name, header.metadata, tuple(operation(t) for t in header.tensors))
        for header in checkpoint.headers
    )
    layer_elements = _layer_elements(family, shape) + _layer_elements(family, target)
    return Plan(
        model_type=family.model_type,
        source_shape=shape,
        num_key_value_heads=kv_heads,
        method=method,
        seed=seed,
        initializer_range=family.number(checkpoint.config, "initializer_range"),
        shards=shards,
        config_edits=family.config_edits(kv_heads) if merges else {},
        peak_bytes=8 * layer_elements if merges else 0,
    )


def check_kv_heads(shape: AttentionShape, kv_heads: int, where: str = "--kv-heads") -> None:
    """Refuse a number of KV heads that the model cannot have.

    Raises:
        PlanError: with the list of those that it can.
    """
    allowed = valid_kv_heads(shape.num_attention_heads, shape.num_key_value_heads)
    if kv_heads not in allowed:
        raise PlanError(
            f"cannot make {kv_heads} KV heads from {shape.num_attention_heads} query heads "
            f"and {shape.num_key_value_heads} KV heads",
            where=where,
            fix=f"choose one of {', '.join(map(str, allowed))}",
        )


def _attention_tensors(
    checkpoint: Checkpoint, family: Family, shape: AttentionShape
) -> dict[str, tuple[int, Role]]:
    """Layer and role of every attention tensor, after checking that all are there and fit."""
    expected_shapes = family.tensor_shapes(shape)
    found: dict[str, tuple[int, Role]] = {}
    for layer in range(shape.num_layers):
        names = family.tensor_names(layer, shape)
        for role, name in names.items():
            _check_tensor(checkpoint, name, expected_shapes[role])
            found[name] = (layer, role)
        _refuse_unknown(
            checkpoint, family.attention_module.format(layer=layer) + ".", set(names.values())
        )
    _refuse_unknown(checkpoint, family.attention_module.format(layer=shape.num_layers) + ".", set())
    return found


def _check_tensor(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"the checkpoint has no tensor {name}",
            where=str(checkpoint.folder),
            fix="config.json must describe these very weights: compare its model_type, "
            "num_hidden_layers and biases with the tensors",
        )
    if tensor.shape != expected:
        raise CheckpointError(
            f"config.json asks for shape {list(expected)} but {name} has {list(tensor.shape)}",
            where=f"{checkpoint.folder / tensor.shard}, {name}",
            fix="set num_attention_heads, num_key_value_heads, head_dim and hidden_size in "
            "config.json to what the weights are; editing them does not convert a model",
        )
    if tensor.dtype not in ("F16", "BF16", "F32", "F64"):
        raise FamilyError(
            f"{name} is stored as {tensor.dtype}; merging needs full floating-point weights",
            where=f"{checkpoint.folder / tensor.shard}, {name}",
            fix="convert the checkpoint before it is quantised",
        )


def _refuse_unknown(checkpoint: Checkpoint, module: str, known: set[str]) -> None:
    """A tensor of an attention that the family does not know would be silently wrong."""
    for name in checkpoint.tensors:
        if name.startswith(module) and name not in known:
            if name.removeprefix(module) in _ATTENTION_BUFFERS:
                continue
            raise CheckpointError(
                f"tensor {name} is not part of the attention that config.json describes",
                where=f"{checkpoint.folder}, {name}",
                fix="check model_type, num_hidden_layers and the bias keys of config.json",
            )


def _layer_elements(family: Family, shape: AttentionShape) -> int:
    return sum(math.prod(dimensions) for dimensions in family.tensor_shapes(shape).values())
