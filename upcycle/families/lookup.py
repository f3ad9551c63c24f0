"""Find the family of a configuration or a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upcycle.attention import AttentionShape
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import FamilyError
from upcycle.families import fused, hybrid, latent, normed, plain
from upcycle.families.family import Family
from upcycle.families.refused import refusal
from upcycle.families.retargets.rules import RETARGETS, target_config
from upcycle.families.spelling import OLD_NAMES, unsupported
from upcycle.registry import Registry

FAMILIES: Registry[Family] = Registry("family", "upcycle.families")

LAYOUTS = (plain, normed, fused, hybrid, latent)
for _module in LAYOUTS:
    for _family in _module.FAMILIES:
        FAMILIES.add(_family.model_type)(_family)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a raw `config.json` names.

    Raises:
        FamilyError: the model is of a kind that cannot be converted, or of no known type.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is not None and family.latent:
        family = None
    refused = refusal(config, supported=family is not None)
    if refused is not None:
        raise refused.error(config)
    if family is None:
        raise _unknown(config)
    return family


def convertible() -> list[str]:
    """The model types whose own class can share KV heads, sorted."""
    return [name for name in FAMILIES.names() if not caches_latent({"model_type": name})]


def caches_latent(config: Mapping[str, Any]) -> bool:
    """Whether a raw `config.json` is of a class with multi-head latent attention."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.latent


def _unknown(config: Mapping[str, Any]) -> FamilyError:
    """The error for a model type that transformers knows under another name, or not at all."""
    old = OLD_NAMES.get(str(config.get("model_type")))
    if old is None:
        return unsupported(config, [*convertible(), *RETARGETS])
    native = old.translated(config)
    if config.get("n_head_kv"):  # the first releases of Falcon had no key for the new decoder
        native["new_decoder_architecture"] = True
    refused = refusal(native, supported=True)
    return old.error(config) if refused is None else refused.error({**native, **config})


def family_in(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint, with the module path that its tensors have.

    A checkpoint of the bare model, without its head, lacks the first part of every name; a class
    with another head may have another first part.

    Raises:
        FamilyError: as for `family_of`.
    """
    family = family_of(checkpoint.config)
    whole = family.attention_module.partition("{layer}")[0]
    bare = whole.partition(".")[2]
    names = checkpoint.tensors
    if any(name.startswith(whole) for name in names):
        return family
    module = family.attention_module.partition(".")[2]
    if not any(name.startswith(bare) for name in names):
        prefix = class_prefix(checkpoint.config)
        if prefix is None:
            return family
        module = f"{prefix}.{module}"
    return replace(family, attention_module=module)


def class_prefix(config: Mapping[str, Any]) -> str | None:
    """The first part of the decoder's names in the class that `architectures` names.

    Returns:
        None where it names no class of transformers for this model type.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    import transformers  # it alone knows

    for name in names:
        found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        of = getattr(getattr(found, "config_class", None), "model_type", None)
        if of is not None and of == config.get("model_type"):
            return getattr(found, "base_model_prefix", None) or None
    return None


def shape_of(config: Mapping[str, Any]) -> AttentionShape:
    """The attention's numbers from a raw `config.json`.

    Where the model's own class cannot share KV heads, they are those of the class that it becomes.

    Raises:
        FamilyError: the model cannot be converted, or a number is missing or contradicts another.
    """
    target = target_config(config)
    return family_of(target).shape(target)
