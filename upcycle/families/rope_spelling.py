"""The two spellings of the rotation: `rope_parameters`, and the keys from before transformers 5.

transformers 5 reads both and writes the first alone; mlx-lm and others read the older keys alone,
and where these are missing many take their own default without a word.
"""

from collections.abc import Mapping
from typing import Any

_LAYER_KINDS = ("full_attention", "sliding_attention")
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor")
_BORN_LATER = {"mellum"}  # classes that never had older keys, and would misread them


def older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `rope_parameters` says, in top-level keys that transformers reads the same.

    Args:
        config: a raw `config.json`.

    Returns:
        `rope_theta`, `partial_rotary_factor` and `rope_scaling`, as far as they apply, and
        `rope_local_base_freq` where sliding layers have a base of their own.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(stated, Mapping) or config.get("model_type") in _BORN_LATER:
        return {}
    kinds = {kind: stated[kind] for kind in _LAYER_KINDS if isinstance(stated.get(kind), Mapping)}
    whole = kinds.get("full_attention", {} if kinds else stated)
    keys = {key: whole[key] for key in _TOP_LEVEL if whole.get(key) is not None}
    if whole.get("rope_type", whole.get("type", "default")) != "default":
        keys["rope_scaling"] = {key: whole[key] for key in whole if key not in _TOP_LEVEL}
    local = kinds.get("sliding_attention", {}).get("rope_theta")
    if local is not None and local != keys.get("rope_theta"):
        keys["rope_local_base_freq"] = local
    return keys


def missing_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `older_rope_keys` that the configuration leaves out or contradicts."""
    return {
        key: value
        for key, value in older_rope_keys(config).items()
        if (not config.get(key) if key == "rope_scaling" else config.get(key) != value)
    }
