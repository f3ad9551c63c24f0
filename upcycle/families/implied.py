"""The heads that a checkpoint's tensors imply, where its configuration says something else."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.checkpoint.naming import unknown_tensor
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError, FamilyError
from upcycle.families.family import Family
from upcycle.families.lookup import family_in
from upcycle.families.spelling import as_json

_NUMBERS = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_HEAD_NORM = re.compile(r"\.norms\.\d+\.weight$")


@dataclass(frozen=True)
class _Rows:
    """What one layer's shapes say whatever the configuration: rows of q, of k, and D."""

    query: int
    key: int
    hidden: int


@dataclass(frozen=True)
class Implied:
    """Numbers that fit the tensors.

    Attributes:
        text: the rows, and the heads that they can be.
        fix: which keys to set.
    """

    text: str
    fix: str


def shape_in(checkpoint: Checkpoint) -> AttentionShape:
    """The attention's numbers of a checkpoint whose class can share KV heads.

    Raises:
        FamilyError: the model cannot be converted, or a number is missing or contradicts another;
            where it is about heads, with those that the tensors imply.
    """
    family = family_in(checkpoint)
    try:
        return family.shape(checkpoint.config)
    except FamilyError as error:
        found = None
        if any(key in error.where for key in _NUMBERS):
            found = _implied(checkpoint, family)
        if found is None:
            raise
        what = f"{error.what}; {found.text}"
        fix = f"{found.fix}; {error.fix}"
        raise FamilyError(what, where=error.where, fix=fix) from error


def misshapen(
    checkpoint: Checkpoint, family: Family, name: str, expected: tuple[int, ...]
) -> CheckpointError:
    """The error for an attention tensor of another shape than the configuration asks for.

    Args:
        checkpoint: where it is.
        family: its layout.
        name: its name.
        expected: the shape that the configuration asks for.
    """
    tensor = checkpoint.tensors[name]
    what = f"config.json asks for shape {list(expected)} but {name} has {list(tensor.shape)}"
    fix = (
        "set num_attention_heads, num_key_value_heads, head_dim and hidden_size in config.json to "
        "what the weights are"
    )
    found = _implied(checkpoint, family)
    if found is not None:
        what, fix = f"{what}: {found.text}", found.fix
    return CheckpointError(
        what,
        where=f"{checkpoint.folder / tensor.shard}, {name}",
        fix=f"{fix}; editing them does not convert a model",
    )


def not_described(checkpoint: Checkpoint, family: Family, name: str) -> CheckpointError:
    """The error for a tensor of an attention that the configuration has no place for.

    Args:
        checkpoint: where it is.
        family: its layout.
        name: its name.
    """
    what = f"tensor {name} is not part of the attention that config.json describes"
    fix = (
        "check model_type, num_hidden_layers and the bias keys of config.json; where an old "
        "revision named or fused its tensors otherwise, fetch the current revision"
    )
    head = _HEAD_NORM.search(name)
    found = _implied(checkpoint, family) if head and _norms_each_head(family) else None
    if head and found is not None:
        what = f"{name} is the norm of a head that config.json does not describe: {found.text}"
        fix = f"{found.fix}; editing them does not convert a model"
    return unknown_tensor(checkpoint, name, what, fix)


def _norms_each_head(family: Family) -> bool:
    return family.qk_norm is not None and family.qk_norm.each_head


def _implied(checkpoint: Checkpoint, family: Family) -> Implied | None:
    """The changes of the configuration that fit, the least first; None where none would help."""
    layers = _rows(checkpoint, family)
    if not layers:
        return None
    rows = layers[min(layers)]
    other = next((layer for layer, found in layers.items() if found != rows), None)
    if other is not None:
        return Implied(
            f"layer {min(layers)} has {_count(rows)}, layer {other} {_count(layers[other])}",
            "convert a model whose layers all have the same heads; config.json can say one number",
        )
    config = checkpoint.config
    now = _numbers(family, config)
    fits = [
        (_edits(family, config, now, heads, kv_heads, dim, rows.hidden), heads, kv_heads, dim)
        for dim in _head_dims(checkpoint, family, now, rows)
        for heads, kv_heads in [(rows.query // dim, rows.key // dim)]
        if rows.query % dim == rows.key % dim == 0 and kv_heads and heads % kv_heads == 0
        if not family.multi_query_key or kv_heads in (1, heads)
    ]
    least = min((len(edits) for edits, *_ in fits), default=0)
    if not least:
        return None
    fits = sorted((fit for fit in fits if len(fit[0]) <= least + 1), key=lambda fit: len(fit[0]))
    best = {(heads, kv_heads, dim): edits for edits, heads, kv_heads, dim in fits}
    heads_text = ", or ".join(
        f"{heads} query heads and {kv_heads} KV heads of head_dim {dim}"
        for heads, kv_heads, dim in best
    )
    fixes = ", or set ".join(
        " and ".join(f"{key} to {as_json(value)}" for key, value in edits.items())
        for edits in best.values()
    )
    return Implied(f"its {_count(rows)} are {heads_text}", f"set {fixes} in config.json")


def _rows(checkpoint: Checkpoint, family: Family) -> dict[int, _Rows]:
    """Of every layer whose projections are there."""
    before, after = family.attention_module.split("{layer}")
    output = f"{family.projections.output}.weight"
    pattern = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}\.{re.escape(output)}")
    keys = family.projections.kv_weights()[0]
    found = {}
    for name, tensor in checkpoint.tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        module = family.attention_module.format(layer=match[1])
        key = checkpoint.tensors.get(f"{module}.{keys}")
        if key is None or len(key.shape) != 2 or len(tensor.shape) != 2:
            return {}
        hidden, query = tensor.shape
        # In one tensor with q, what is left is half keys and half values.
        fused = len(family.projections.kv_weights()) == 1
        rows = (key.shape[0] - query) // 2 if fused else key.shape[0]
        if min(rows, query, hidden) < 1:
            return {}
        found[int(match[1])] = _Rows(query, rows, hidden)
    return found


def _numbers(family: Family, config: Mapping[str, Any]) -> dict[str, int | None]:
    """What the configuration or the class says; None where it says no positive number."""
    found = {key: family.setting(config, key) for key in _NUMBERS}
    if family.multi_query_key is not None:
        one = bool(family.setting(config, family.multi_query_key))
        found["num_key_value_heads"] = 1 if one else found["num_attention_heads"]
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return {k: v if type(v) is int and v > 0 else None for k, v in found.items()}


def _head_dims(
    checkpoint: Checkpoint, family: Family, now: Mapping[str, int | None], rows: _Rows
) -> list[int]:
    """Sizes of a head that something speaks for: a tensor of that size alone, or the numbers."""
    first = family.attention_module.format(layer=min(_rows(checkpoint, family)))
    norm = family.qk_norm
    if norm is not None and norm.key is not None and norm.norm.span == "shared":
        weight = checkpoint.tensors.get(f"{first}.{norm.key}.weight")
        if weight is not None and len(weight.shape) == 1:
            return [weight.shape[0]]
    if norm is not None and norm.key is not None and norm.each_head:
        weight = checkpoint.tensors.get(f"{first}.{norm.key}.norms.0.weight")
        if weight is not None and len(weight.shape) == 1:
            return [weight.shape[0]]
    heads, kv_heads = now["num_attention_heads"], now["num_key_value_heads"]
    sinks = checkpoint.tensors.get(f"{first}.{family.sinks}") if family.sinks else None
    if sinks is not None and len(sinks.shape) == 1:
        heads = kv_heads = sinks.shape[0]
    guesses = [
        rows.query // heads if heads else 0,
        now["head_dim"] if sinks is None else 0,
        rows.key // kv_heads if kv_heads and sinks is None else 0,
    ]
    return list(dict.fromkeys(guess for guess in guesses if guess))


def _edits(
    family: Family,
    config: Mapping[str, Any],
    now: Mapping[str, int | None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
) -> dict[str, Any]:
    """The keys to set, by the name that the configuration has for them."""
    edits: dict[str, Any] = {}

    def edit(key: str, value: Any) -> None:
        alias = family.aliases.get(key, key)
        edits[alias if alias in config and key not in config else key] = value

    if heads != now["num_attention_heads"]:
        edit("num_attention_heads", heads)
    if hidden != now["hidden_size"]:
        edit("hidden_size", hidden)
    if family.multi_query_key is not None:
        if bool(family.setting(config, family.multi_query_key)) != (kv_heads == 1):
            edit(family.multi_query_key, kv_heads == 1)
    else:
        stated = family.setting(config, "num_key_value_heads")
        if kv_heads != (heads if stated is None else stated):
            edit("num_key_value_heads", kv_heads)
    stated = family.setting(config, "head_dim")
    if head_dim != (hidden // heads if stated is None else stated):
        edit("head_dim", head_dim)
    return edits


def _count(rows: _Rows) -> str:
    return f"{rows.query} query rows and {rows.key} key rows"
