"""What a conversion would carry along in silence and other engines would take otherwise."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from upcycle.checkpoint.files import read_json_object
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.errors import CheckpointError
from upcycle.families.retargets.rules import RETARGETS
from upcycle.families.rope_spelling import missing_rope_keys

GENERATION_CONFIG = "generation_config.json"


def cautions(source: Checkpoint, config: Mapping[str, Any], kv_heads: int) -> tuple[str, ...]:
    """One line for each thing that a conversion's user should know before serving it.

    Args:
        source: the checkpoint on disk.
        config: the configuration of the class that is converted.
        kv_heads: g.
    """
    rule = RETARGETS.get(str(source.config.get("model_type")))
    if rule is None:
        found = list(_rope(config))
    else:
        target = next(made for made in rule.targets if made.model_type == config["model_type"])
        found = target.cautions(config, kv_heads)
    return (*found, *_cache(source))


def _cache(source: Checkpoint) -> Iterator[str]:
    """Files that switch the KV cache off, which every conversion copies."""
    said = [f"{CONFIG_FILE}, {path}" for path in _switched_off(source.config)]
    said += [f"{GENERATION_CONFIG}, {path}" for path in _switched_off(_generation(source))]
    if said:
        yield (
            f"use_cache is false ({'; '.join(said)}), so no KV cache is kept and generate() reads "
            "the whole text again for every token: set it to true"
        )


def _generation(source: Checkpoint) -> Mapping[str, Any]:
    path = source.folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)[1]
    except CheckpointError:  # it is copied as it is, and `doctor` says what is wrong with it
        return {}


def _switched_off(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of `use_cache` where it is false, in nested configurations too."""
    for key, value in document.items():
        if key == "use_cache" and value is False:
            yield prefix + key
        elif isinstance(value, Mapping):
            yield from _switched_off(value, f"{prefix}{key}.")


def _rope(config: Mapping[str, Any]) -> Iterator[str]:
    missing = missing_rope_keys(config)
    if missing:
        pairs = ", ".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in missing.items()
        )
        yield (
            f"engines that do not read rope_parameters (mlx-lm for most classes) take a default "
            f"rotation, and give wrong tokens: add {pairs} to the top level of the source's "
            f"{CONFIG_FILE} and convert again; transformers reads the same"
        )
