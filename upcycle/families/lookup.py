"""Find the family of a configuration."""

from collections.abc import Mapping
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.errors import FamilyError
from upcycle.families import gemma, llama, mistral, phi, qwen2
from upcycle.families.family import Family
from upcycle.registry import Registry

FAMILIES: Registry[Family] = Registry("family", "upcycle.families")

for _module in (gemma, llama, mistral, phi, qwen2):
    FAMILIES.add(_module.FAMILY.model_type)(_module.FAMILY)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a raw `config.json` names.

    Raises:
        FamilyError: the model type is not known, or the checkpoint is quantised.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise FamilyError(
            f"model_type {model_type!r} is not supported",
            where="config.json, model_type",
            fix=f"supported are {', '.join(FAMILIES.names())}",
        )
    quantisation = config.get("quantization_config")
    if quantisation:
        named = isinstance(quantisation, Mapping) and quantisation.get("quant_method")
        method = named or "unknown method"
        raise FamilyError(
            f"the checkpoint is quantised ({method}); merging needs the full weights",
            where="config.json, quantization_config",
            fix="convert the checkpoint that was quantised, then quantise the result",
        )
    return family


def shape_of(config: Mapping[str, Any]) -> AttentionShape:
    """The attention's numbers from a raw `config.json`.

    Raises:
        FamilyError: the family is not supported, or a number is missing or contradicts another.
    """
    return family_of(config).shape(config)
