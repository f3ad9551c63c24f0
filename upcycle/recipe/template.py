"""A recipe with every key and what it means, to be written for a user's own checkpoint."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from upcycle.options.base import section_in
from upcycle.recipe.schema import Recipe

_WIDTH = 98


def recipe_text(values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """A recipe in YAML: these values, and every other key with its default as a comment.

    Args:
        values: what the recipe says, as nested mappings; sections that are not there are comments.
        notes: what else there is to say about a value, by its dotted key.
    """
    return "\n".join(_section(Recipe, values, notes, "")) + "\n"


def _section(
    model: type[BaseModel], values: Mapping[str, Any], notes: Mapping[str, str], prefix: str
) -> Iterator[str]:
    """The lines of a section; one without values is a comment as a whole."""
    indent = "  " * prefix.count(".")
    for key, field in model.model_fields.items():
        dotted = f"{prefix}{key}"
        is_list = get_origin(field.annotation) is tuple  # which has its sections on one line
        below = None if is_list else section_in(field.annotation)
        if not prefix and below is not None:
            yield ""
        about = " ".join(filter(None, [field.description, notes.get(dotted)]))
        for line in textwrap.wrap(" ".join(about.split()), _WIDTH - len(indent)):
            yield f"{indent}# {line}"
        is_given = key in values
        if below is not None:
            hidden = "" if is_given else "# "
            yield f"{indent}{hidden}{key}:"
            lines = _section(below, values.get(key, {}), notes, f"{dotted}.")
            yield from lines if is_given else map(_commented, lines)
        elif is_given:
            yield f"{indent}{key}: {_plain(values[key])}"
        else:
            yield f"{indent}# {key}: {_plain(_default(field))}"


def _commented(line: str) -> str:
    text = line.lstrip()
    return line if text.startswith("#") else f"{line[: len(line) - len(text)]}# {text}"


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.default


def _plain(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool | int | float | None):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
