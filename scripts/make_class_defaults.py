"""Write what transformers' classes assume for keys that config.json leaves out.

    python scripts/make_class_defaults.py

Written are the keys that `upcycle/families` names, of every class that it describes.
"""

import argparse
import ast
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from upcycle.families import cached, convertible, extra_attention, family, qk_norms
from upcycle.families.class_config import DATA
from upcycle.families.lookup import LAYOUTS
from upcycle.families.retargets import gpt2, gpt_neox, gptj, opt, rule
from upcycle.families.retargets.rules import RETARGETS
from upcycle.planning import planner

FAMILY_MODULES = (*LAYOUTS, cached, extra_attention, family, planner, qk_norms)
RETARGET_MODULES = (gpt2, gpt_neox, gptj, opt, rule)
ROTARY = "partial_rotary_factor"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    DATA.write_text(text(), encoding="utf-8")
    print(f"{DATA}: {len(found())} classes")


def text() -> str:
    """The file: a class a line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(values, sort_keys=True)}"
        for name, values in sorted(found().items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def found() -> dict[str, dict[str, Any]]:
    """The defaults of every class that is described, by model type."""
    read = {
        **dict.fromkeys(convertible(), keys_in(FAMILY_MODULES)),
        **dict.fromkeys(RETARGETS, keys_in(RETARGET_MODULES)),
    }
    return {
        name: defaults(name, keys) for name, keys in read.items() if name in CONFIG_MAPPING_NAMES
    }


def keys_in(modules: Iterable[ModuleType]) -> set[str]:
    """Every string that modules have in their code."""
    trees = (ast.parse(Path(str(module.__file__)).read_text("utf-8")) for module in modules)
    constants = (node for tree in trees for node in ast.walk(tree))
    return {
        node.value
        for node in constants
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def defaults(model_type: str, keys: set[str]) -> dict[str, Any]:
    """The numbers, words and flags that a class declares under these keys, by their usual names."""
    config = AutoConfig.for_model(model_type)
    # n_embd is usually called hidden_size; num_mtp_layers is kept as num_nextn_predict_layers.
    usual = {own: name for name, own in config.attribute_map.items()} | config.attribute_map
    declared = {
        usual.get(field.name, field.name): field.default
        for field in dataclasses.fields(config)
        if isinstance(field.default, bool | int | float | str)
    }
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, Mapping) and ROTARY in rope:  # a class sets it where it reads the rotation
        declared[ROTARY] = rope[ROTARY]
    return {key: value for key, value in declared.items() if key in keys}


if __name__ == "__main__":
    main()
