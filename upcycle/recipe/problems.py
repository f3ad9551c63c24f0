"""What pydantic finds wrong with a document, in our words."""

import difflib
from collections.abc import Callable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from upcycle.options.base import REFUSED, section_in
from upcycle.recipe.strict_yaml import Location, Problem


def problems_of(
    error: ValidationError, root: type[BaseModel], place: Callable[[Location], str]
) -> list[Problem]:
    """Our words for each error; one that only repeats an error further down is left out.

    Args:
        error: of validating a document.
        root: what the document should have been.
        place: file, line and key of a location.
    """
    found = error.errors()
    deeper = {details["loc"][:length] for details in found for length in range(len(details["loc"]))}
    return [
        Problem(place(details["loc"]), _in_words(details, root))
        for details in found
        if details["loc"] not in deeper
    ]


def _in_words(details: ErrorDetails, root: type[BaseModel]) -> str:
    """One pydantic error in our words."""
    location = details["loc"]
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(root, location)}"
    if kind == "missing":
        return "this key is required"
    if kind in ("model_type", "model_attributes_type"):
        section = _model_at(root, location)
        keys = ", ".join(section.model_fields) if section else ""
        return f"should have keys of its own ({keys}), not {details['input']!r}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if kind in ("value_error", REFUSED):
        return message
    return f"{message}, not {details['input']!r}"


def _suggestion(root: type[BaseModel], location: Location) -> str:
    model = _model_at(root, location[:-1])
    if model is None:
        return ""
    names = sorted(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid here: {', '.join(names)}"


def _model_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The section that a location names; the index of a repeated one adds nothing."""
    section: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, str):
            field = section.model_fields.get(part) if section else None
            section = section_in(field.annotation) if field else None
    return section
