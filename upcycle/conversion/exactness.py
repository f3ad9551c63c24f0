"""The exactness checks, each with its measured number and its limit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from upcycle.attention import AttentionWeights
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.nonfinite import count_nonfinite
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checks import Check
from upcycle.conversion.merging import by_weights_alone, merge_layer
from upcycle.conversion.untouched import differing_copies
from upcycle.conversion.whole_model import (
    HIDDEN,
    describe,
    fp64_outputs,
    layers_to_build,
    relative_difference,
    relative_differences,
)
from upcycle.errors import CheckpointError, warn
from upcycle.families.extra_attention import old_heads
from upcycle.heads.gauge import scramble
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.moments import MomentCollector
from upcycle.heads.permute import can_reorder, permute_kv_heads
from upcycle.heads.pool import norm_is_per_head
from upcycle.heads.reference import attention_output
from upcycle.kvcache.counting import kv_cache_bytes
from upcycle.kvcache.layout import cache_layout
from upcycle.models.generation import measured_cache_bytes
from upcycle.models.loading import classes_of, load_model, plain_classes
from upcycle.planning import Attention, Copy, Plan, planned_family

if TYPE_CHECKING:
    from upcycle.families import Role

PERMUTED_LIMIT = 1e-10
PLANTED_ERROR = 1e-8
LOGITS_LIMIT = 1e-6
CACHED_LOGITS_LIMIT = 1e-4
_PROBE_TOKENS = 48
_CAUSAL = "AutoModelForCausalLM"


def check_untouched(source: Checkpoint, output: Checkpoint, todo: Plan) -> Check:
    """Every tensor that the plan copies has the source's bytes, dtype and name."""
    wrong = differing_copies(source, output, todo)
    copies = sum(isinstance(op, Copy) for op in todo.operations)
    detail = f"first: {wrong[0]}" if wrong else f"{copies} tensors compared byte by byte"
    return Check("tensors outside the merged attention are identical", len(wrong), 0, detail)


def compare_files(
    source: Path, output: Path, read: Mapping[str, str], written: Mapping[str, str]
) -> Check:
    """Both folders hold the very files that the conversion read and wrote, by their hashes."""
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
    reorder, reason = True, ""
    for layer, weights in _layers(source, todo):
        x = _probe_input(weights, layer)
        generator = torch.Generator().manual_seed(layer)
        order = torch.randperm(weights.num_key_value_heads, generator=generator).tolist()
        expected = attention_output(weights, x)
        planted = replace(weights, v=weights.v.double() * (1 + PLANTED_ERROR))
        reorder, reason = can_reorder(weights)
        if reorder:
            permuted = attention_output(permute_kv_heads(weights, order), x)
            worst = max(worst, relative_difference(permuted, expected))
        scrambled = attention_output(scramble(_widened(weights), generator), x)
        worst_scrambled = max(worst_scrambled, relative_difference(scrambled, expected))
        least_planted = min(
            least_planted, relative_difference(attention_output(planted, x), expected)
        )
    return [
        Check(
            "permuted heads give the same attention output",
            worst if reorder else None,
            PERMUTED_LIMIT,
            "largest relative difference of a layer, fp64" if reorder else reason,
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


def check_permuted_logits(source: Checkpoint, todo: Plan) -> list[Check]:
    """The whole model with reordered heads, through transformers' own class, in fp64.

    Where heads have their places they are transformed instead.
    """
    layers = layers_to_build(source)
    try:
        expected = fp64_outputs(source, layers)
    except CheckpointError as error:
        reason = f"transformers cannot load the source: {error.what}"
        return [Check("permuted heads give the same logits", None, LOGITS_LIMIT, reason)]
    what, detail = expected.kind, f"relative to the largest, fp64, {describe(layers)}"
    permuted = f"permuted heads give the same {what}"
    reorder, reason = can_reorder(next(_layers(source, todo))[1])
    if reorder:
        changed = fp64_outputs(source, layers, _changed(source, todo, layers, _reversed))
        return [Check(permuted, relative_differences(changed, expected), LOGITS_LIMIT, detail)]
    changed = fp64_outputs(source, layers, _changed(source, todo, layers, _scrambled))
    transformed = relative_differences(changed, expected)
    return [
        Check(permuted, None, LOGITS_LIMIT, reason),
        Check(f"gauge-transformed heads give the same {what}", transformed, LOGITS_LIMIT, detail),
    ]


def _reversed(weights: AttentionWeights) -> AttentionWeights:
    return permute_kv_heads(weights, list(reversed(range(weights.num_key_value_heads))))


def _scrambled(weights: AttentionWeights) -> AttentionWeights:
    return scramble(_widened(weights), torch.Generator().manual_seed(0))


def _changed(
    source: Checkpoint,
    todo: Plan,
    layers: int | None,
    change: Callable[[AttentionWeights], AttentionWeights],
) -> dict[str, Tensor]:
    """The attention tensors of a model's first layers after a change, by their names."""
    family = planned_family(source, todo)
    changed: dict[str, Tensor] = {}
    for layer, weights in _layers(source, todo):
        if layers is not None and layer >= layers:
            break
        names = family.tensor_names(layer, todo.source_shape)
        tensors = family.write(change(weights))
        changed |= {names[role]: tensor for role, tensor in tensors.items()}
    return changed


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


def check_reload(output: Checkpoint, todo: Plan) -> list[Check]:
    """Plain transformers loads the output; its cache is right and as small as predicted."""
    from transformers import DynamicCache

    try:
        model, name = _loaded(output)
    except CheckpointError as error:
        return [Check("plain AutoModelForCausalLM loads it", 1, 0, error.what)]
    windows = filter(None, cache_layout(output.config).windows)
    # A full window would drop keys, rightly.
    length = max(2, min(_PROBE_TOKENS, min(windows, default=_PROBE_TOKENS + 1) - 1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    cache = DynamicCache(config=model.config)
    # The head of a classifier reads one token's hidden state: those of all tokens say more.
    output_name, what = ("logits", "logits") if name == _CAUSAL else ("last_hidden_state", HIDDEN)
    run = model if name == _CAUSAL else model.base_model
    with torch.no_grad():
        whole = run(ids, use_cache=False)[output_name]
        steps = [
            run(ids[:, i : i + 1], cache=cache, use_cache=True)[output_name] for i in range(length)
        ]
    difference = relative_difference(torch.cat(steps, 1), whole)
    predicted = kv_cache_bytes(todo.target_shape, length=length, bytes_per_element=4)
    measured = measured_cache_bytes(cache)
    return [
        Check(
            f"plain {name} gives the same {what} with and without cache",
            difference,
            CACHED_LOGITS_LIMIT,
            f"{length} tokens, fp32, relative to the largest",
        ),
        Check(
            "the cache holds the predicted bytes",
            abs(measured - predicted),
            0,
            f"{measured:,} bytes for {length} tokens in fp32",
        ),
    ]


def _loaded(output: Checkpoint) -> tuple[Any, str]:
    """The model of the first class that the folder is enough for, and the class's name for users.

    Raises:
        CheckpointError: it is enough for none.
    """
    first: CheckpointError | None = None
    for model_class in classes_of(output.config):
        try:
            model = load_model(output.folder, dtype=torch.float32, model_class=model_class)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None:
            warn(f"{first.what}; what is checked is {model_class.__name__}, which has no such head")
        causal = model_class is plain_classes(model.config)[0]
        return model, _CAUSAL if causal else model_class.__name__
    assert first is not None
    raise first


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
