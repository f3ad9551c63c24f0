"""The commands that a recipe's sections stand for."""

import shlex

from upcycle.options.convert import ConvertOptions
from upcycle.recipe.layout import Layout
from upcycle.recipe.schema import Recipe


def convert_command(recipe: Recipe, *, overwrite: bool = False) -> str:
    """The `upcycle convert` that makes what `upcycle run` makes of the `convert` section."""
    words = ["upcycle", "convert", recipe.source, str(Layout(recipe).converted)]
    section = recipe.convert
    defaults = {name: field.default for name, field in ConvertOptions.model_fields.items()}
    words += section.words(name for name, value in section if value != defaults[name])
    return shlex.join([*words, *(["--overwrite"] if overwrite else [])])
