"""Everything that a conversion will do, as plain data, before any weight is read."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.checkpoint.buffers import is_buffer
from upcycle.checkpoint.headers import TensorInfo, TensorSpec
from upcycle.checkpoint.naming import missing_tensor, unknown_tensor
from upcycle.checkpoint.quantised import refuse_quantised
from upcycle.checkpoint.reader import INDEX_FILE, Checkpoint
from upcycle.checkpoint.remote_code import AUTO_MAP, model_code, own_class, without_model_code
from upcycle.checkpoint.sharding import shard_name, split_by_size
from upcycle.checkpoint.writer import ShardLayout
from upcycle.errors import CheckpointError, FamilyError, PlanError
from upcycle.families import Family, Role, family_in
from upcycle.families.implied import misshapen, shape_in
from upcycle.families.retargets.view import retargeted


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
        layer: whose attention.
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
        has_index: whether an index tells which file has which tensor.
        config_edits: the keys of `config.json` that change.
        config_removed: the keys that go.
        peak_bytes: the most tensor memory that is needed at once, in fp64.
    """

    model_type: str
    source_shape: AttentionShape
    num_key_value_heads: int
    method: str
    seed: int
    initializer_range: float
    shards: tuple[PlannedShard, ...]
    has_index: bool
    config_edits: Mapping[str, Any]
    config_removed: tuple[str, ...]
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
    source: str | Path | Checkpoint,
    *,
    kv_heads: int,
    method: str = "mean",
    seed: int = 0,
    max_shard_size: int | None = None,
) -> Plan:
    """Plan a conversion from headers and configuration alone.

    Args:
        source: a checkpoint folder, a Hub id, or an opened checkpoint.
        kv_heads: g. Divisors of K merge (K itself copies every tensor); multiples of K that
            divide H repeat KV heads, which is exact.
        method: a registered merge method.
        seed: for methods that draw.
        max_shard_size: the most bytes of tensors in an output file, where no single tensor is
            larger; None keeps the source's files.

    Raises:
        CheckpointError: the checkpoint is damaged, or its shapes contradict its configuration.
        FamilyError: the model has no KV heads that can be merged.
        PlanError: `kv_heads` or `max_shard_size` is not possible.
    """
    opened = source if isinstance(source, Checkpoint) else Checkpoint.describe(source)
    checkpoint = retargeted(opened)
    family = family_in(checkpoint)
    refuse_quantised(checkpoint)
    shape = shape_in(checkpoint)
    check_kv_heads(shape, kv_heads)
    with own_class(checkpoint.config, checkpoint.folder):
        layers = _attention_tensors(checkpoint, family, shape)
    target = replace(shape, num_key_value_heads=kv_heads)
    merges = kv_heads != shape.num_key_value_heads
    planner = _Planner(family, layers if merges else {}, target)
    shards = tuple(
        PlannedShard(
            header.path.name,
            header.metadata,
            tuple(op for tensor in header.tensors for op in planner.operations(tensor)),
        )
        for header in checkpoint.headers
    )
    has_index = (checkpoint.folder / INDEX_FILE).is_file()
    if max_shard_size is not None:
        shards = _sharded(shards, max_shard_size)
        has_index = len(shards) > 1
    edits = dict(family.config_edits(checkpoint.config, kv_heads)) if merges else {}
    kept_code = without_model_code(checkpoint.config)
    if kept_code and model_code(checkpoint.config):
        edits[AUTO_MAP] = kept_code
    layer_elements = _layer_elements(family, shape) + _layer_elements(family, target)
    return Plan(
        model_type=family.model_type,
        source_shape=shape,
        num_key_value_heads=kv_heads,
        method=method,
        seed=seed,
        initializer_range=family.number(checkpoint.config, "initializer_range"),
        shards=shards,
        has_index=has_index,
        config_edits=edits,
        config_removed=(AUTO_MAP,) if AUTO_MAP in checkpoint.config and not kept_code else (),
        peak_bytes=8 * layer_elements if merges else 0,
    )


def check_kv_heads(shape: AttentionShape, kv_heads: int, where: str = "--kv-heads") -> None:
    """Refuse a number of KV heads that the model cannot have.

    Raises:
        PlanError: with the list of those that it can.
    """
    allowed = shape.valid_kv_heads
    if kv_heads not in allowed:
        raise PlanError(
            f"cannot make {kv_heads} KV heads from {shape.num_attention_heads} query heads "
            f"and {shape.num_key_value_heads} KV heads",
            where=where,
            fix=f"choose one of {', '.join(map(str, allowed))}",
        )


def _sharded(shards: tuple[PlannedShard, ...], max_shard_size: int) -> tuple[PlannedShard, ...]:
    """The same operations in the same order, in other files."""
    if max_shard_size < 1:
        raise PlanError(
            f"a file cannot hold {max_shard_size} bytes",
            where="--max-shard-size",
            fix="give a size such as 5GB, or leave it out to keep the source's files",
        )
    operations = [operation for shard in shards for operation in shard.operations]
    parts = split_by_size([operation.output.nbytes for operation in operations], max_shard_size)
    metadata: dict[str, str] = {}
    for shard in shards:
        metadata = {**(shard.metadata or {}), **metadata}
    return tuple(
        PlannedShard(shard_name(i, len(parts)), metadata or None, tuple(operations[part]))
        for i, part in enumerate(parts)
    )


class _Planner:
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


def _attention_tensors(
    checkpoint: Checkpoint, family: Family, shape: AttentionShape
) -> dict[int, dict[str, Role]]:
    """Each layer's roles by tensor name, after checking that all are there and fit."""
    expected_shapes = family.tensor_shapes(shape)
    layers: dict[int, dict[str, Role]] = {}
    for layer in shape.attention_layers:
        names = family.tensor_names(layer, shape)
        _refuse_unknown(checkpoint, _module(family, layer), set(names.values()))
        for role, name in names.items():
            _check_tensor(checkpoint, family, name, expected_shapes[role])
        layers[layer] = {name: role for role, name in names.items()}
    total = family.count(checkpoint.config, "num_hidden_layers")
    for layer in set(range(total)) - set(shape.attention_layers):
        _refuse_attention(checkpoint, set(family.tensor_names(layer, shape).values()), layer)
    numbers = set(map(str, range(total)))
    layer_in = re.compile(re.escape(family.attention_module).replace(r"\{layer\}", r"(\d+)"))
    for name in checkpoint.tensors:
        found = layer_in.match(name)
        if found and found[1] not in numbers:
            _refuse_unknown(checkpoint, found[0] + ".", set())
    return layers


def _module(family: Family, layer: int) -> str:
    return family.attention_module.format(layer=layer) + "."


def _check_tensor(
    checkpoint: Checkpoint, family: Family, name: str, expected: tuple[int, ...]
) -> None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise missing_tensor(
            checkpoint,
            name,
            fix="config.json must describe these very weights: compare its model_type, "
            "num_hidden_layers and biases with the tensors",
        )
    if tensor.shape != expected:
        raise misshapen(checkpoint, family, name, expected)
    if tensor.dtype not in ("F16", "BF16", "F32", "F64"):
        raise FamilyError(
            f"{name} is stored as {tensor.dtype}; merging needs full floating-point weights",
            where=f"{checkpoint.folder / tensor.shard}, {name}",
            fix="convert the checkpoint before it is quantised",
        )


def _refuse_unknown(checkpoint: Checkpoint, module: str, known: set[str]) -> None:
    """A tensor of an attention that the family does not know would be silently wrong."""
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(module) and name not in known and not is_buffer(name, tensor.shape):
            raise unknown_tensor(
                checkpoint,
                name,
                f"tensor {name} is not part of the attention that config.json describes",
                fix="check model_type, num_hidden_layers and the bias keys of config.json; where "
                "an old revision named or fused its tensors otherwise, fetch the current revision",
            )


def _refuse_attention(checkpoint: Checkpoint, names: set[str], layer: int) -> None:
    """An attention where the configuration says that there is none would stay unconverted."""
    found = sorted(names & set(checkpoint.tensors))
    if found:
        raise CheckpointError(
            f"config.json says that layer {layer} has no attention, but there is {found[0]}",
            where=f"{checkpoint.folder}, {found[0]}",
            fix="config.json must say which layers have attention",
        )


def _layer_elements(family: Family, shape: AttentionShape) -> int:
    return sum(math.prod(dimensions) for dimensions in family.tensor_shapes(shape).values())
