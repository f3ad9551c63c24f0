"""The exactness checks, each with its measured number and its limit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.checkpoint.loading import load_model
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.nonfinite import count_nonfinite
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.conversion.merging import by_weights_alone, merge_layer
from upcycle.conversion.untouched import differing_copies
from upcycle.conversion.whole_model import (
    describe,
    fp64_logits,
    layers_to_build,
    relative_difference,
)
from upcycle.errors import CheckpointError
from upcycle.families.extra_attention import old_heads
from upcycle.heads.gauge import scramble
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.moments import MomentCollector
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.pool import norm_is_per_head
from upcycle.heads.reference import attention_output
from upcycle.kvcache.counting import kv_cache_bytes
from upcycle.kvcache.measured import measured_cache_bytes
from upcycle.planning import Attention, Copy, Plan, planned_family

if TYPE_CHECKING:
    from upcycle.families import Role

PERMUTED_LIMIT = 1e-10
PLANTED_ERROR = 1e-8
LOGITS_LIMIT = 1e-6
CACHED_LOGITS_LIMIT = 1e-4
_PROBE_TOKENS = 48


@dataclass(frozen=True)
class Check:
    """One exactness check.

    Attributes:
        name: what must hold.
        measured: the number that was seen.
        limit: the largest number that passes; 0 means bit-identical or equal.
        detail: what was compared, or where it failed first.
    """

    name: str
    measured: float
    limit: float
    detail: str

    @property
    def passed(self) -> bool:
        """Whether the number is within its limit (a NaN is not)."""
        return self.measured <= self.limit


def check_untouched(source: Checkpoint, output: Checkpoint, todo: Plan) -> Check:
    """Every tensor that the plan copies has the source's bytes, dtype and name."""
    wrong = differing_copies(source, output, todo)
    copies = sum(isinstance(op, Copy) for op in todo.operations)
    detail = f"first: {wrong[0]}" if wrong else f"{copies} tensors compared byte by byte"
    return Check("tensors outside the merged attention are identical", len(wrong), 0, detail)


def check_files(source: Path, output: Path, manifest: Mapping[str, Any]) -> Check:
    """Both folders hold the very files that the conversion read and wrote."""
    read, written = manifest["source"]["files"], manifest["result"]["files"]
    found, made = hash_folder(source), hash_folder(output)
    wrong = [source / name for name in sorted(read) if found.get(name) != read[name]]
    names = sorted(made.keys() | written.keys())
    wrong += [output / name for name in names if made.get(name) != written.get(name)]
    count = len(read) + len(written)
    detail = f"first: {wrong[0]}" if wrong else f"{count} files by their content hash"
    return Check("source and output are as the conversion left them", len(wrong), 0, detail)


def check_old_heads(source: Checkpoint, output: Checkpoint, todo: Plan) -> Check:
    """No tensor that is named like keys or values has the source's number of KV heads."""
    family = planned_family(source, todo)
    wrong = old_heads(output, family, todo.source_shape, todo.target_shape)
    detail = f"first: {wrong[0]}" if wrong else f"{len(output.tensors)} tensors by name and shape"
    return Check("no attention keeps the old KV heads", len(wrong), 0, detail)


def check_merged(
    source: Checkpoint, output: Checkpoint, todo: Plan, *, calibrated: bool = False
) -> Check:
    """Made again from the source, every merged or repeated tensor is the same, bit for bit.

    Of a plan whose method needs text it is extra attention alone, which is merged without.
    """
    family = planned_family(source, todo)
    extra = {each.layer for each in todo.extra}
    planned = [op for op in todo.operations if isinstance(op, Attention)]
    if calibrated:
        planned = [op for op in planned if op.layer in extra]
    todo = by_weights_alone(todo)
    made: dict[int, dict[Role, Tensor]] = {}
    wrong = []
    for op in sorted(planned, key=lambda op: op.layer):
        if op.layer not in made:
            made = {op.layer: merge_layer(source, family, todo, op.layer)}
        spec, found = op.output, output.tensors.get(op.output.name)
        if (
            found is None
            or (found.dtype, found.shape) != (spec.dtype, spec.shape)
            or not torch.equal(output.read(spec.name), made[op.layer][op.role])
        ):
            wrong.append(spec.name)
    detail = f"first: {wrong[0]}" if wrong else f"{len(planned)} tensors made again"
    return Check("merged tensors are what the method makes", len(wrong), 0, detail)


def check_finite(source: Checkpoint, todo: Plan) -> Check:
    """No tensor outside the merged attention has NaN or infinity, which would be copied."""
    copies = [op.output.name for op in todo.operations if isinstance(op, Copy)]
    counts = {name: count_nonfinite(source, name) for name in copies}
    wrong = [f"{name} ({count:,})" for name, count in counts.items() if count]
    detail = f"first: {wrong[0]}" if wrong else f"{len(copies)} tensors scanned"
    return Check("copied tensors are finite", len(wrong), 0, detail)


def check_config(source: Checkpoint, output: Checkpoint, todo: Plan) -> Check:
    """The configuration differs in the planned keys alone."""
    edited = {**source.config, **todo.config_edits}
    wanted = {key: value for key, value in edited.items() if key not in todo.config_removed}
    wrong = sorted(
        key
        for key in wanted.keys() | output.config.keys()
        if wanted.get(key) != output.config.get(key)
    )
    names = [*todo.config_edits, *(f"{key} (removed)" for key in todo.config_removed)]
    detail = f"first: {wrong[0]}" if wrong else f"edited: {', '.join(names) or 'none'}"
    return Check(f"{CONFIG_FILE} changed in the planned keys alone", len(wrong), 0, detail)


def check_permuted_heads(source: Checkpoint, todo: Plan) -> list[Check]:
    """Reordered and transformed heads give the same output, and a planted error would be seen."""
    worst = worst_scrambled = 0.0
    least_planted = float("inf")
    for layer, weights in _layers(source, todo):
        x = _probe_input(weights, layer)
        generator = torch.Generator().manual_seed(layer)
        order = torch.randperm(weights.num_key_value_heads, generator=generator).tolist()
        expected = attention_output(weights, x)
        permuted = attention_output(permute_kv_heads(weights, order), x)
        planted = replace(weights, v=weights.v.double() * (1 + PLANTED_ERROR))
        worst = max(worst, relative_difference(permuted, expected))
        scrambled = attention_output(scramble(_widened(weights), generator), x)
        worst_scrambled = max(worst_scrambled, relative_difference(scrambled, expected))
        least_planted = min(
            least_planted, relative_difference(attention_output(planted, x), expected)
        )
    return [
        Check(
            "permuted heads give the same attention output",
            worst,
            PERMUTED_LIMIT,
            "largest relative difference of a layer, fp64",
        ),
        Check(
            "gauge-transformed heads give the same attention output",
            worst_scrambled,
            PERMUTED_LIMIT,
            "largest relative difference of a layer, fp64; transforms that its norms allow",
        ),
        Check(
            "a planted relative error of 1e-8 is seen",
            0 if least_planted > PERMUTED_LIMIT else 1,
            0,
            f"seen as {least_planted:.1e}",
        ),
    ]


def check_permuted_logits(source: Checkpoint, todo: Plan) -> Check:
    """The whole model with reordered heads, through transformers' own class, in fp64."""
    family, layers = planned_family(source, todo), layers_to_build(source)
    replaced: dict[str, Tensor] = {}
    for layer, weights in _layers(source, todo):
        if layers is not None and layer >= layers:
            break
        order = list(reversed(range(weights.num_key_value_heads)))
        names = family.tensor_names(layer, todo.source_shape)
        permuted = family.write(permute_kv_heads(weights, order))
        replaced |= {names[role]: tensor for role, tensor in permuted.items()}
    name = "permuted heads give the same logits"
    try:
        expected = fp64_logits(source, layers)
    except CheckpointError as error:
        return Check(name, float("inf"), LOGITS_LIMIT, error.what)
    difference = relative_difference(fp64_logits(source, layers, replaced), expected)
    detail = f"relative to the largest logit, fp64, {describe(layers)}"
    return Check(name, difference, LOGITS_LIMIT, detail)


def check_equal_heads(source: Checkpoint, todo: Plan) -> Check:
    """The method loses nothing where the heads of a group are already equal."""
    method = get_method(todo.method)
    groups = todo.num_key_value_heads
    size = todo.source_shape.num_key_value_heads // groups
    worst = 0.0
    extra = {each.layer for each in todo.extra}
    for layer, weights in _layers(source, todo):
        if layer in extra:
            method = get_method(by_weights_alone(todo).method)
        x = _probe_input(weights, layer)
        tied = _widened(_tie_groups(weights, size))
        collector = MomentCollector(tied)
        collector.add(x)
        moments = collector.moments() if method.needs_calibration else None
        request = MergeRequest(groups, layer, todo.seed, todo.initializer_range, moments)
        merged = method.merge(tied, request)
        difference = relative_difference(attention_output(merged, x), attention_output(tied, x))
        worst = max(worst, difference)
    return Check(
        f"{todo.method} merges equal heads without loss",
        worst,
        PERMUTED_LIMIT,
        "largest relative difference of a layer, fp64",
    )


def check_reload(output: Path, todo: Plan) -> list[Check]:
    """Plain transformers loads the output; its cache is right and as small as predicted."""
    from transformers import DynamicCache

    try:
        model = load_model(output, dtype=torch.float32)
    except CheckpointError as error:
        return [Check("plain AutoModelForCausalLM loads it", 1, 0, error.what)]
    window = getattr(model.config, "sliding_window", None) or _PROBE_TOKENS + 1
    length = max(2, min(_PROBE_TOKENS, window - 1))  # a full window would drop keys, rightly
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        steps = [
            model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(length)
        ]
    difference = relative_difference(torch.cat(steps, 1), whole)
    predicted = kv_cache_bytes(todo.target_shape, length=length, bytes_per_element=4)
    measured = measured_cache_bytes(cache)
    return [
        Check(
            "plain AutoModelForCausalLM gives the same logits with and without cache",
            difference,
            CACHED_LOGITS_LIMIT,
            f"{length} tokens, fp32, relative to the largest logit",
        ),
        Check(
            "the cache holds the predicted bytes",
            abs(measured - predicted),
            0,
            f"{measured:,} bytes for {length} tokens in fp32",
        ),
    ]


def _layers(source: Checkpoint, todo: Plan) -> Iterator[tuple[int, AttentionWeights]]:
    """The source's attention, one layer in memory at a time."""
    family = planned_family(source, todo)
    for layer in todo.attention_layers:
        names = family.tensor_names(layer, todo.source_shape)
        tensors = {role: source.read(name) for role, name in names.items()}
        yield layer, family.read(tensors, todo.source_shape)


def _tie_groups(weights: AttentionWeights, size: int) -> AttentionWeights:
    """Replace every KV head by the first of its group of `size`."""

    def tie(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else heads[::size].repeat_interleave(size, 0)

    return replace(
        weights,
        k=weights.k[::size].repeat_interleave(size, 0),
        v=weights.v[::size].repeat_interleave(size, 0),
        k_bias=tie(weights.k_bias),
        v_bias=tie(weights.v_bias),
        k_norm=tie(weights.k_norm) if norm_is_per_head(weights) else weights.k_norm,
    )


def _widened(weights: AttentionWeights) -> AttentionWeights:
    """In fp64, so that what a method computes is not rounded to the stored dtype."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    wide: dict[str, Any] = {n: t.double() for n, t in tensors.items() if isinstance(t, Tensor)}
    return replace(weights, **wide)


def _probe_input(weights: AttentionWeights, layer: int) -> Tensor:
    """[T, D] fp64 noise of unit scale, as after a norm."""
    generator = torch.Generator().manual_seed(layer)
    size = (_PROBE_TOKENS, weights.q.shape[-1])
    return torch.randn(size, generator=generator, dtype=torch.float64)
