"""Models some of whose layers have attention; the others are copied."""

from collections.abc import Callable, Mapping
from typing import Any

from upcycle.attention import QkNorm
from upcycle.errors import FamilyError
from upcycle.families.cached import States, delta_rule, mamba, mamba_2, short_convolution
from upcycle.families.family import Family
from upcycle.families.projections import Separate
from upcycle.families.qk_norms import NormTensors

_BIAS = "attention_bias"
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
Rule = Callable[[Family, Mapping[str, Any]], tuple[int, ...]]


def _listed(otherwise: Rule, *, key: str = "layer_types") -> Rule:
    """The layers that a list of kinds calls attention; another rule where there is no list."""

    def rule(family: Family, config: Mapping[str, Any]) -> tuple[int, ...]:
        kinds = config.get(key)
        if kinds is None:
            return otherwise(family, config)
        count = family.count(config, "num_hidden_layers")
        if not isinstance(kinds, list) or len(kinds) != count:
            raise _bad(family, key, kinds, f"a list of {count} kinds of layer")
        return tuple(layer for layer, kind in enumerate(kinds) if kind in _ATTENTION)

    return rule


def _indexed(key: str) -> Rule:
    """The layers whose numbers a list gives."""

    def rule(family: Family, config: Mapping[str, Any]) -> tuple[int, ...]:
        indices, count = config.get(key), family.count(config, "num_hidden_layers")
        if not isinstance(indices, list) or not set(indices) <= set(range(count)):
            raise _bad(family, key, indices, f"a list of layers from 0 to {count - 1}")
        return tuple(sorted(set(indices)))

    return rule


def _every(period: str, offset: str | None = None) -> Rule:
    """One layer in a period: the last, or the one at an offset."""

    def rule(family: Family, config: Mapping[str, Any]) -> tuple[int, ...]:
        step = family.count(config, period)
        place = step - 1 if offset is None else int(family.number(config, offset))
        return tuple(range(place, family.count(config, "num_hidden_layers"), step))

    return rule


def _bad(family: Family, key: str, value: object, wanted: str) -> FamilyError:
    return FamilyError(
        f"{key} is {str(value)[:60]}, not {wanted}",
        where=f"config.json, {key} (model_type {family.model_type})",
        fix="config.json must say which layers have attention",
    )


FAMILIES = (
    Family(
        "jamba",
        rope_pairing="none",
        attention_layers=_every("attn_layer_period", "attn_layer_offset"),
        states=States(mamba),
    ),
    Family(
        "granitemoehybrid",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rope_when=("position_embedding_type", "rope"),
        attention_layers=_listed(_listed(_indexed("layer_types"), key="layers_block_type")),
        states=States(mamba_2),
    ),
    *(
        Family(
            model_type,
            projections=Separate(output="out_proj"),
            qk_norm=NormTensors(
                QkNorm("rms", "shared"), "norm_eps", query="q_layernorm", key="k_layernorm"
            ),
            attention_layers=_listed(_indexed("full_attn_idxs")),
            states=States(short_convolution),
        )
        for model_type in ("lfm2", "lfm2_moe")
    ),
    Family(
        "qwen3_next",
        {"full_attention_interval": 4},
        projections=Separate(gated=True),
        qk_norm=NormTensors(QkNorm("rms", "shared", offset=1.0)),
        attention_layers=_listed(_every("full_attention_interval")),
        states=States(delta_rule),
        refused={_BIAS: "the biases of its gated queries are not handled"},
    ),
)
