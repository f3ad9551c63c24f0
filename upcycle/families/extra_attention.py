"""Attention outside the decoder's numbered layers: of multi-token prediction, of draft heads.

Servers build such blocks from the decoder's own configuration (the layers that DeepSeek-V3 and
GLM-4.5 store behind the last one, `mtp.layers.0` of Qwen3-Next, `model.mtp_layers.0` of MiMo,
`model.mtp_block.0` of Ernie 4.5), so that they must have as many KV heads as the decoder's layers.
transformers ignores them when it loads the model. A tower that a configuration of its own
describes is none of these.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.checkpoint.headers import MERGEABLE_DTYPES
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families.family import Family

# How configurations spell the number of layers that predict further tokens.
NEXTN_KEYS = (
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers",
    "num_mtp_modules", "num_nextn_layers",
)  # fmt: skip
_PREDICTS = re.compile(r"(?:^|[._])(?:mtp|nextn|multi_token|draft|eagle|medusa)", re.IGNORECASE)
# What a layer that predicts further tokens has beside a decoder layer's tensors.
_PREDICTOR_PARTS = re.compile(r"(?:^|\.)(?:eh_proj|enorm|hnorm|shared_head)\.")
_TOWER = re.compile(
    r"(?:^|[._])(?:vision|visual|vit|image|audio|speech|encoder|qformer|resampler|perceiver)",
    re.IGNORECASE,
)
_TOWER_WORDS = {"vision": "vision|visual|vit|image"}  # other configurations have the path's word
# Names of key and value projections in other layouts than the family's.
_OTHER_LAYOUT = re.compile(
    r"\.(?:[kv]_proj|kv_proj|qkv_proj|qkv|query_key_value|c_attn|wqkv|w?[kv]|key|value"
    r"|key_proj|value_proj|linear_qkv|attn_qkv|attn_[kv]|in_proj_qkv)\.(?:weight|bias)$",
    re.IGNORECASE,
)
# A module that is called an attention, whatever its tensors are called. Linear attention has no
# KV heads.
_ATTENTION = re.compile(r"(?:^|\.)(?!linear)\w*(?:attn|attention)(?=\.)", re.IGNORECASE)


@dataclass(frozen=True)
class ExtraAttention:
    """An attention outside the decoder's layers that has the decoder's number of KV heads.

    Attributes:
        layer: the number that it goes by in a plan, behind the last layer's.
        module: its path.
        block: the path of all that belongs to it; empty where it lies among the decoder's tensors.
        predicts: whether it belongs to multi-token prediction, by its name or place.
        problem: why it cannot be merged like a layer of the decoder; None where it can.
        stray: whether it is a layer behind the last that nothing speaks of.
    """

    layer: int
    module: str
    block: str
    predicts: bool
    problem: str | None = None
    stray: bool = False

    def owns(self, name: str) -> bool:
        """Whether a tensor goes with it when it is dropped."""
        if not self.block:
            return False
        if name.startswith(self.block + "."):
            return True
        # Ernie's norms and projections lie beside the block.
        return bool(_PREDICTS.search(self.block) and _PREDICTS.search(name))


def extra_attention(
    checkpoint: Checkpoint, family: Family, shape: AttentionShape
) -> tuple[ExtraAttention, ...]:
    """Every attention that must change with the decoder's, in the order of their names.

    Args:
        checkpoint: whose tensors are looked at by name and shape.
        family: as `family_in` finds it.
        shape: of the decoder's attention.
    """
    total = family.count(checkpoint.config, "num_hidden_layers")
    decoder = {family.attention_module.format(layer=layer) for layer in range(total)}
    paths = {path for module in decoder for path in prefixes(module)}
    found: list[ExtraAttention] = []
    for module in sorted(_candidates(checkpoint, family, shape) - decoder, key=_natural):
        behind = _behind(family, module, total)
        is_next = behind is not None or bool(_PREDICTS.search(module))
        problem = _problem(checkpoint, family, shape, module)
        if not is_next and _is_another(checkpoint, family, shape, module):
            continue
        block = block_of(module, paths)
        stray = behind is not None and not _is_known(checkpoint, family, behind - total, block)
        layer = total + len(found)
        found.append(ExtraAttention(layer, module, block, is_next, problem, stray))
    return tuple(found)


def old_heads(
    converted: Checkpoint, family: Family, before: AttentionShape, after: AttentionShape
) -> list[str]:
    """Tensors of a conversion that are called like K or V of the family and have the old rows.

    Args:
        converted: the result, in which there should be none.
        family: whose names.
        before: the attention that was converted.
        after: what it has become.
    """
    old, new = family.tensor_shapes(before), family.tensor_shapes(after)
    rows = {
        role: old[role][0]
        for role in family.kv_shapes(before)
        if role not in new or new[role][0] != old[role][0]
    }
    endings = tuple(f".{role}" for role in rows)
    found = []
    for name, tensor in converted.tensors.items():
        if name.endswith(endings) and tensor.shape[:1] == (rows[_role(name, rows)],):
            module = name[: -len(_role(name, rows)) - 1]
            if not _is_another(converted, family, before, module):
                found.append(name)
    return found


def is_tower(config: Mapping[str, Any], module: str) -> bool:
    """Whether a configuration inside `config.json` is that of a module beside the decoder."""
    for key, value in config.items():
        kind, _, rest = key.rpartition("_config")
        if rest or not isinstance(value, Mapping) or not any("head" in name for name in value):
            continue
        words = _TOWER_WORDS.get(kind, re.escape(kind))
        if kind and re.search(rf"(?:^|[._])(?:{words})", module, re.IGNORECASE):
            return True
    return False


def predicting_layers(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say how many layers predict further tokens, those of the class included."""
    return {
        key: family.setting(config, key)
        for key in NEXTN_KEYS
        if key in config or family.setting(config, key)
    }


def predicts(block: str, names: Iterable[str]) -> bool:
    """Whether a block predicts further tokens, by its path or by what its tensors are called."""
    return bool(_PREDICTS.search(block)) or any(
        _PREDICTOR_PARTS.search(name) or _PREDICTS.search(name) for name in names
    )


def attention_of(name: str) -> str | None:
    """The path of the attention whose key or value projection a tensor is, in any layout."""
    match = _OTHER_LAYOUT.search(name)
    return name[: match.start()] if match else None


def block_of(path: str, decoder: Collection[str]) -> str:
    """The uppermost part of a path that is not among the decoder's; empty where there is none."""
    return next((part for part in [*prefixes(path), path] if part not in decoder), "")


def is_of_tower(config: Mapping[str, Any], module: str) -> bool:
    """Whether a path is that of a module beside the decoder that has heads of its own."""
    return is_tower(config, module) or bool(_TOWER.search(module))


def prefixes(path: str) -> list[str]:
    """Every path above this one, the root's first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _candidates(checkpoint: Checkpoint, family: Family, shape: AttentionShape) -> set[str]:
    """Modules with a tensor that is called like one of K or V, or called an attention."""
    roles = family.kv_shapes(shape)
    endings = tuple(f".{role}" for role in roles)
    found = {
        name[: -len(_role(name, roles)) - 1]
        for name in checkpoint.tensors
        if name.endswith(endings)
    }
    if not roles:
        return found
    total = family.count(checkpoint.config, "num_hidden_layers")
    others = []
    for name, tensor in checkpoint.tensors.items():
        if _PREDICTS.search(name) or _behind(family, name, total) is not None:
            match = _OTHER_LAYOUT.search(name)
            if match:
                found.add(name[: match.start()])
            elif len(tensor.shape) > 1 and not tensor.is_buffer:
                others.append(name)
    known = tuple(f"{module}." for module in found)
    called = (_ATTENTION.search(name) for name in others if not name.startswith(known))
    return found | {match.string[: match.end()] for match in called if match}


def _role(name: str, roles: Iterable[str]) -> str:
    return next(role for role in roles if name.endswith(f".{role}"))


def _problem(
    checkpoint: Checkpoint, family: Family, shape: AttentionShape, module: str
) -> str | None:
    """Why an attention is not one of the decoder's, or None where it is in every tensor."""
    expected = family.tensor_shapes(shape)
    for role, dimensions in expected.items():
        tensor = checkpoint.tensors.get(f"{module}.{role}")
        if tensor is None:
            return f"it has no {role}, which the decoder's layers have"
        if tensor.shape != dimensions:
            return f"its {role} is {list(tensor.shape)}, the decoder's {list(dimensions)}"
        if tensor.dtype not in MERGEABLE_DTYPES:
            return f"its {role} is stored as {tensor.dtype}"
    prefix = module + "."
    for name, tensor in checkpoint.tensors.items():
        is_known = name.removeprefix(prefix) in expected or tensor.is_buffer
        if name.startswith(prefix) and not is_known:
            return f"it has {name.removeprefix(prefix)}, which the decoder's layers have not"
    return None


def _is_another(checkpoint: Checkpoint, family: Family, shape: AttentionShape, module: str) -> bool:
    """Whether a module that does not predict tokens has heads of its own, which stay."""
    if is_of_tower(checkpoint.config, module):
        return True
    roles = family.kv_shapes(shape)
    tensors = ((dims, checkpoint.tensors.get(f"{module}.{role}")) for role, dims in roles.items())
    return not any(tensor and tensor.shape[:1] == dims[:1] for dims, tensor in tensors)


def _is_known(checkpoint: Checkpoint, family: Family, place: int, block: str) -> bool:
    """Whether a layer behind the last is one that predicts, and no sign of a wrong number."""
    said = predicting_layers(family, checkpoint.config)
    counts = [count for count in said.values() if type(count) is int]
    # Some configurations say 0 and store one all the same.
    if said and place < max([1, *counts]):
        return True
    prefix = block + "."
    return predicts(block, (name for name in checkpoint.tensors if name.startswith(prefix)))


def _behind(family: Family, name: str, total: int) -> int | None:
    """The number of the layer that a name lies in, where it is behind the decoder's last."""
    found = re.match(re.escape(_layer_path(family)).replace(r"\{layer\}", r"(\d+)\."), name + ".")
    return int(found[1]) if found and int(found[1]) >= total else None


def _layer_path(family: Family) -> str:
    return family.attention_module.partition("{layer}")[0] + "{layer}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders numbers by value."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]
