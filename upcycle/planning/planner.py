"""Everything that a conversion will do, as plain data, before any weight is read."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.checkpoint.headers import MERGEABLE_DTYPES
from upcycle.checkpoint.naming import layer_behind, missing_tensor
from upcycle.checkpoint.quantised import refuse_quantised
from upcycle.checkpoint.reader import INDEX_FILE, Checkpoint
from upcycle.checkpoint.remote_code import AUTO_MAP, model_code, own_class, without_model_code
from upcycle.checkpoint.writer import shard_name, split_by_size
from upcycle.errors import CheckpointError, FamilyError, PlanError
from upcycle.families import Family, Role, family_in
from upcycle.families.cautions import cautions
from upcycle.families.extra_attention import (
    ExtraAttention,
    extra_attention,
    predicting_layers,
)
from upcycle.families.implied import misshapen, not_described, shape_in
from upcycle.families.retargets.view import left_out_of, on_disk, retargeted
from upcycle.planning.operations import Operation, OperationPlanner, PlannedShard


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
        extra: attentions outside the decoder's layers that are converted like one of them.
        dropped: those that are left out, each with its block.
        dropped_tensors: how many tensors are left out with them.
        peak_bytes: the most tensor memory that is needed at once, in fp64.
        warnings: what to know before the result is served; it changes nothing of the result.
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
    extra: tuple[ExtraAttention, ...]
    dropped: tuple[ExtraAttention, ...]
    dropped_tensors: int
    peak_bytes: int
    warnings: tuple[str, ...] = field(default=(), repr=False)  # a resumed run may warn of less

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose attention is converted, extra ones last."""
        return (*self.source_shape.attention_layers, *(extra.layer for extra in self.extra))

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
    drop_extra_attention: bool = False,
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
        drop_extra_attention: leave out what has attention outside the decoder's layers, such as
            multi-token prediction, instead of merging it like one of them.

    Raises:
        CheckpointError: the checkpoint is damaged, its shapes contradict its configuration, or
            attention outside the decoder's layers cannot be merged like one of them.
        FamilyError: the model has no KV heads that can be merged.
        PlanError: `kv_heads` or `max_shard_size` is not possible.
    """
    prepared = _prepare(source, drop_extra_attention)
    checkpoint, family, shape = prepared.checkpoint, prepared.family, prepared.shape
    check_kv_heads(shape, kv_heads)
    target = replace(shape, num_key_value_heads=kv_heads)
    merges = kv_heads != shape.num_key_value_heads
    prepared.refuse_problems(merges)
    shards = prepared.shards(kv_heads)
    has_index = (checkpoint.folder / INDEX_FILE).is_file()
    if max_shard_size is not None:
        shards = _sharded(shards, max_shard_size)
        has_index = len(shards) > 1
    layer_elements = _layer_elements(family, shape) + _layer_elements(family, target)
    edits = dict(family.config_edits(checkpoint.config, kv_heads)) if merges else {}
    kept_code = without_model_code(checkpoint.config)
    if kept_code and model_code(checkpoint.config):
        edits[AUTO_MAP] = kept_code
    if any(extra.predicts for extra in prepared.dropped):
        said = predicting_layers(family, checkpoint.config)
        edits |= {key: 0 for key, count in said.items() if count}
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
        extra=tuple(extra for extra in prepared.extra if extra.problem is None),
        dropped=prepared.dropped,
        dropped_tensors=sum(map(prepared.drops, on_disk(checkpoint).tensors)),
        peak_bytes=8 * layer_elements if merges else 0,
        warnings=cautions(on_disk(checkpoint), checkpoint.config, kv_heads),
    )


@dataclass(frozen=True)
class PlannedSizes:
    """What conversions of a source would write.

    Attributes:
        output_bytes: of the plan for each number of KV heads.
        extra: attentions outside the decoder's layers; one that has a problem is counted as it is,
            though a plan refuses to merge heads around it.
    """

    output_bytes: Mapping[int, int]
    extra: tuple[ExtraAttention, ...]


def planned_sizes(source: str | Path | Checkpoint) -> PlannedSizes:
    """The sizes of the plans for every number of KV heads, without making them all.

    Raises:
        CheckpointError: as for `plan`.
        FamilyError: the model has no KV heads that can be merged.
    """
    prepared = _prepare(source, drop=False)
    tensors = [t for header in prepared.checkpoint.headers for t in header.tensors]
    names = {name for layer in prepared.layers.values() for name in layer}
    attention = [tensor for tensor in tensors if tensor.name in names]
    copied = sum(tensor.nbytes for tensor in tensors if tensor.name not in names)
    sizes = {}
    for kv_heads in prepared.shape.valid_kv_heads:
        planner = prepared.planner(kv_heads)
        operations = [op for tensor in attention for op in planner.operations(tensor)]
        sizes[kv_heads] = copied + sum(op.output.nbytes for op in operations)
    return PlannedSizes(sizes, prepared.extra)


def planned_family(checkpoint: Checkpoint, todo: Plan) -> Family:
    """The checkpoint's family, which also names the tensors of the plan's extra attention."""
    modules = {extra.layer: extra.module for extra in todo.extra}
    return replace(family_in(checkpoint), extra_modules=modules)


@dataclass(frozen=True)
class _Prepared:
    """A checked source, for plans with any number of KV heads."""

    checkpoint: Checkpoint
    family: Family
    shape: AttentionShape
    layers: Mapping[int, Mapping[str, Role]]
    extra: tuple[ExtraAttention, ...]
    dropped: tuple[ExtraAttention, ...]

    def drops(self, name: str) -> bool:
        """Whether a tensor goes with an attention that is dropped."""
        return any(extra.owns(name) for extra in self.dropped)

    def planner(self, kv_heads: int) -> OperationPlanner:
        """What turns each tensor into its operations."""
        merges = kv_heads != self.shape.num_key_value_heads
        target = replace(self.shape, num_key_value_heads=kv_heads)
        return OperationPlanner(self.family, self.layers if merges else {}, target)

    def shards(self, kv_heads: int) -> tuple[PlannedShard, ...]:
        """The output in the source's files, without those of which nothing is left."""
        planner = self.planner(kv_heads)
        shards = []
        for header in self.checkpoint.headers:
            kept = [tensor for tensor in header.tensors if not self.drops(tensor.name)]
            operations = tuple(op for tensor in kept for op in planner.operations(tensor))
            if operations or not header.tensors:
                shards.append(PlannedShard(header.path.name, header.metadata, operations))
        return tuple(shards)

    def refuse_problems(self, merges: bool) -> None:
        """An attention that keeps the old heads would be wrong under the new configuration."""
        lost = left_out_of(self.checkpoint)
        for extra in self.extra:
            if extra in lost or (merges and extra.problem is not None):
                way_out = "pass --drop-extra-attention to leave it out, or " if extra.block else ""
                raise CheckpointError(
                    f"{extra.module} is attention outside the decoder's layers that cannot be "
                    f"merged like one of them: {extra.problem}",
                    where=f"{self.checkpoint.folder}, {extra.module}",
                    fix=f"{way_out}remove its tensors"
                    if extra in lost
                    else f"{way_out}remove its tensors; kept as it is, it would have "
                    f"{self.shape.num_key_value_heads} KV heads under a config.json that says less "
                    "or more",
                )


def _prepare(source: str | Path | Checkpoint, drop: bool) -> _Prepared:
    """Look at names, shapes and dtypes once.

    Raises:
        CheckpointError: the checkpoint is damaged, or its shapes contradict its configuration.
        FamilyError: the model has no KV heads that can be merged.
    """
    opened = source if isinstance(source, Checkpoint) else Checkpoint.describe(source)
    checkpoint = retargeted(opened)
    family = family_in(checkpoint)
    refuse_quantised(checkpoint)
    shape = shape_in(checkpoint)
    extra = (*extra_attention(checkpoint, family, shape), *left_out_of(checkpoint))
    dropped = tuple(each for each in extra if drop and each.block)
    kept = tuple(each for each in extra if each not in dropped)
    with own_class(checkpoint.config, checkpoint.folder):
        layers = _attention_tensors(checkpoint, family, shape, extra)
        for each in kept:
            if each.stray:
                behind = (n for n in checkpoint.tensors if n.startswith(f"{each.module}."))
                total = family.count(checkpoint.config, "num_hidden_layers")
                raise layer_behind(checkpoint, next(behind), total)
    family = replace(family, extra_modules={each.layer: each.module for each in kept})
    for each in kept:
        if each.problem is None:
            names = family.tensor_names(each.layer, shape)
            layers[each.layer] = {name: role for role, name in names.items()}
    return _Prepared(checkpoint, family, shape, layers, kept, dropped)


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
            fix="give a size such as 5GB, or omit it to keep the source's files",
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


def _attention_tensors(
    checkpoint: Checkpoint,
    family: Family,
    shape: AttentionShape,
    extra: Collection[ExtraAttention],
) -> dict[int, dict[str, Role]]:
    """Each decoder layer's roles by tensor name, after checking that all are there and fit."""
    expected_shapes = family.tensor_shapes(shape)
    layers: dict[int, dict[str, Role]] = {}
    for layer in shape.attention_layers:
        names = family.tensor_names(layer, shape)
        _refuse_unknown(checkpoint, family, layer, set(names.values()))
        for role, name in names.items():
            _check_tensor(checkpoint, family, name, expected_shapes[role])
        layers[layer] = {name: role for role, name in names.items()}
    total = family.count(checkpoint.config, "num_hidden_layers")
    for layer in set(range(total)) - set(shape.attention_layers):
        _refuse_attention(checkpoint, set(family.tensor_names(layer, shape).values()), layer)
    numbers, modules = set(map(str, range(total))), {each.module for each in extra}
    layer_in = re.compile(re.escape(family.attention_module).replace(r"\{layer\}", r"(\d+)"))
    for name, tensor in checkpoint.tensors.items():
        found = layer_in.match(name)
        if not found or tensor.is_buffer:
            continue
        if found[1] not in numbers and found[0] not in modules:
            raise layer_behind(checkpoint, name, total)
    return layers


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
    if tensor.dtype not in MERGEABLE_DTYPES:
        raise FamilyError(
            f"{name} is stored as {tensor.dtype}; merging needs full floating-point weights",
            where=f"{checkpoint.folder / tensor.shard}, {name}",
            fix="convert the checkpoint before it is quantised",
        )


def _refuse_unknown(checkpoint: Checkpoint, family: Family, layer: int, known: set[str]) -> None:
    """A tensor of an attention that the family does not know would be silently wrong."""
    module = family.attention_module.format(layer=layer) + "."
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(module) and name not in known and not tensor.is_buffer:
            raise not_described(checkpoint, family, name)


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
