"""The commands that a recipe's sections stand for."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.options.convert import ConvertOptions
from upcycle.recipe.layout import Layout
from upcycle.recipe.schema import Recipe


def convert_command(recipe: Recipe, *, overwrite: bool = False) -> str:
    """The `upcycle convert` that makes what `upcycle run` makes of the `convert` section."""
    words = ["upcycle", "convert", recipe.source, str(Layout(recipe).converted)]
    words += ["--kv-heads", str(recipe.convert.kv_heads)]
    for key, value in _given(recipe.convert).items():
        words += _option(f"--{key.replace('_', '-')}", value)
    return shlex.join([*words, *(["--overwrite"] if overwrite else [])])


def _given(section: ConvertOptions) -> Mapping[str, Any]:
    """The options that differ from the command's own, which are the section's."""
    defaults = {name: field.default for name, field in ConvertOptions.model_fields.items()}
    return {
        name: value for name, value in section if name != "kv_heads" and value != defaults[name]
    }


def _option(name: str, value: bool | str | int | Path | tuple[Path, ...]) -> list[str]:
    if value is True:
        return [name]
    values = value if isinstance(value, tuple) else (value,)
    return [word for item in values for word in (name, str(item))]
