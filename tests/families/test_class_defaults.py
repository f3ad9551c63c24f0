"""The defaults of classes are those of the installed transformers, and need it no more."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import transformers

from upcycle.families import FAMILIES, convertible
from upcycle.families.class_config import DATA, class_defaults

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_class_defaults.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_class_defaults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_installed_transformers_says() -> None:
    made = script()
    now, kept = made.found(), json.loads(DATA.read_text(encoding="utf-8"))
    differ = [
        f"{name}.{key}: {kept.get(name, {}).get(key)!r} in the file, {now.get(name, {}).get(key)!r}"
        for name in sorted({*now, *kept})
        for key in sorted({*now.get(name, {}), *kept.get(name, {})})
        if now.get(name, {}).get(key) != kept.get(name, {}).get(key)
    ]
    version = transformers.__version__
    assert differ == [], f"transformers {version}; scripts/make_class_defaults.py writes it anew"
    assert DATA.read_text(encoding="utf-8") == made.text()


def test_every_class_that_can_be_converted_has_its_sizes() -> None:
    for name in convertible():
        family = FAMILIES.get(name)
        assert family is not None
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            assert family.count({}, key) > 0, (name, key)
        assert family.number({}, "initializer_range") > 0, name


def test_a_class_that_is_not_described_has_none() -> None:
    assert class_defaults("bloom") == class_defaults("unheard_of") == {}


def test_a_row_holds_no_number_that_the_file_has() -> None:
    for family in FAMILIES:
        assert not set(family.defaults) & set(class_defaults(family.model_type)), family.model_type
