"""Find the retarget of a configuration."""

from collections.abc import Mapping
from typing import Any

from upcycle.checkpoint.remote_code import AUTO_MAP, without_model_code
from upcycle.families.retargets import gpt2, gpt_neox, gptj, opt
from upcycle.families.retargets.rule import Retarget
from upcycle.families.rope_spelling import older_rope_keys

RETARGETS: Mapping[str, Retarget] = {
    rule.model_type: rule
    for rule in (gptj.CODEGEN, gpt2.RETARGET, gpt_neox.RETARGET, gptj.GPTJ, opt.RETARGET)
}


def target_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the class that a model becomes before its heads are merged.

    Args:
        config: a raw `config.json`.

    Returns:
        A fresh configuration, or `config` itself where the model's own class can share KV heads.

    Raises:
        FamilyError: no class can express this model.
    """
    rule = RETARGETS.get(str(config.get("model_type")))
    if rule is None:
        return config
    settings = rule.settings(config)
    target = {
        **rule.config(settings),
        **settings.copied(),
        "tokenizer_class": config.get("tokenizer_class") or rule.tokenizer_class,
    }
    target |= older_rope_keys(target)
    kept_code = without_model_code(config)
    if kept_code:
        target[AUTO_MAP] = kept_code
    stored = config.get("dtype", config.get("torch_dtype"))
    return target if stored is None else {**target, "dtype": stored}
