"""Model types under names that transformers does not know: which of its classes each is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from upcycle.errors import FamilyError

_UNDER_AN_OLDER_NAME = "under an older name"


@dataclass(frozen=True)
class OldName:
    """A model type whose model is one of transformers' own.

    Attributes:
        native: the model type that transformers has for it.
        difference: how it differs from that, after "transformers' <native>".
        keys: configuration keys that have other names in the native class.
        values: keys that the native class needs with these values.
        steps: what else is to be done, in the imperative.
        renames: whether the configuration alone makes it native; else `steps` say all.
    """

    native: str
    difference: str = _UNDER_AN_OLDER_NAME
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    steps: str = ""
    renames: bool = True

    def translated(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the native names."""
        named = {self.keys.get(key, key): value for key, value in config.items()}
        return {**named, **self.values, "model_type": self.native}

    def error(self, config: Mapping[str, Any]) -> FamilyError:
        """The error for a configuration of this type, with the keys that it has."""
        parts = []
        if self.renames:
            parts.append(f'set model_type to "{self.native}" in config.json')
            old = [f"{key} to {new}" for key, new in self.keys.items() if key in config]
            if old:
                parts.append(f"rename {', '.join(old)}")
            parts += [f"set {key} to {as_json(value)}" for key, value in self.values.items()]
            if "auto_map" in config:
                parts.append("remove auto_map")
        if self.steps:
            parts.append(self.steps)
        return FamilyError(
            f"model_type {config.get('model_type')!r} is transformers' {self.native} "
            f"{self.difference}",
            where="config.json, model_type",
            fix=", ".join(parts),
        )


_FALCON = OldName(
    "falcon",
    keys={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "n_embed": "hidden_size",
    },
)
_FIRST_PHI = OldName(
    "phi",
    "in the layout of its first revisions, which fuses q, k and v",
    steps="fetch the repository's current revision, whose tensors are named for transformers' phi",
    renames=False,
)
OLD_NAMES: Mapping[str, OldName] = {
    "RefinedWebModel": _FALCON,
    "RefinedWeb": _FALCON,
    "mixformer-sequential": _FIRST_PHI,
    "phi-msft": _FIRST_PHI,
    "stablelm_epoch": OldName(
        "stablelm",
        keys={
            "norm_eps": "layer_norm_eps",
            "rope_pct": "partial_rotary_factor",
            "num_heads": "num_attention_heads",
        },
    ),
    "aquila": OldName("llama"),
    "internlm": OldName("llama", keys={"bias": "attention_bias"}),
    "skywork": OldName("llama"),
    "xverse": OldName("llama"),
    "Yi": OldName(
        "llama",
        steps="rename ln1 to input_layernorm and ln2 to post_attention_layernorm in the names of "
        "the tensors, or fetch the repository's current revision",
    ),
    "orion": OldName(
        "stablelm",
        "with a rotation of all channels",
        keys={"rms_norm_eps": "layer_norm_eps"},
        values={"partial_rotary_factor": 1.0},
    ),
    "minicpm": OldName(
        "granite",
        "with other names of its multipliers",
        keys={"scale_emb": "embedding_multiplier"},
        steps="set residual_multiplier to scale_depth / sqrt(num_hidden_layers), logits_scaling to "
        "hidden_size / dim_model_base and attention_multiplier to head_dim ** -0.5",
    ),
    "baichuan": OldName(
        "llama",
        "with q, k and v in one tensor (W_pack)",
        steps="split the rows of each W_pack into q_proj, k_proj and v_proj, a third each, and "
        "save it as llama; Baichuan 2 also needs each row of lm_head divided by its norm, and the "
        "13B models have ALiBi and fit no class",
        renames=False,
    ),
    "qwen": OldName(
        "qwen2",
        "with q, k and v in one tensor (c_attn) and other names",
        steps="save it as a class of transformers with LlamaFactory's scripts/convert_ckpt/"
        "llamafy_qwen.py, or take a Qwen1.5 or later, which is qwen2",
        renames=False,
    ),
    "chatglm": OldName(
        "glm",
        "in the layout of its authors' code (ChatGLM2 and later; ChatGLM-6B fits no class)",
        steps="fetch the revision whose name ends in -hf, such as glm-4-9b-chat-hf",
        renames=False,
    ),
}


def unsupported(config: Mapping[str, Any], supported: Iterable[str]) -> FamilyError:
    """The error for a model type that is none of ours and no older name of one.

    Args:
        config: the parsed `config.json`.
        supported: the model types that can be converted.
    """
    names = sorted(supported)
    meant = _meant(config, names)
    guess = f'if it is {meant}, set model_type to "{meant}"; ' if meant else ""
    return FamilyError(
        f"model_type {config.get('model_type')!r} is not supported",
        where="config.json, model_type",
        fix=f"{guess}supported are {', '.join(names)}",
    )


def _meant(config: Mapping[str, Any], names: list[str]) -> str | None:
    """The model type that a misspelt one, or else the class in `architectures`, looks like."""
    plain = {_plain(name): name for name in names}
    close = get_close_matches(_plain(str(config.get("model_type"))), plain, n=1, cutoff=0.8)
    if close:
        return plain[close[0]]
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        found = plain.get(_plain(str(name).removesuffix("ForCausalLM").removesuffix("LMHeadModel")))
        if found:
            return found
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def as_json(value: Any) -> str:
    """A number, a word or a flag as a user types it into `config.json`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
