"""What the options of all stages are made of."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from upcycle.byte_sizes import parse_bytes
from upcycle.errors import UpcycleError

# Words that stand for text instead of naming a file: what comes with the package, and what the
# source writes itself.
BUILTIN, SELF = "builtin", "self"
TEXT_WORDS = (BUILTIN, SELF)
MAX_BAD_SHARE = 0.01  # of a text file's rows
REFUSED = "refused"  # the kind of an error that tells the way on in words of its own


def option_refusal(what: str, fix: str) -> PydanticCustomError:
    """What a validator raises, to tell the way on too."""
    return PydanticCustomError(REFUSED, "{what}; {fix}", {"what": what, "fix": fix})


def _bytes(value: object) -> object:
    """The bytes of a size in words."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, where="size")
    except UpcycleError as error:
        raise option_refusal(error.what, error.fix) from error


def _apart_from_words(value: object) -> object:
    """A file's path, never a word that stands for text: `./self` is a file."""
    if isinstance(value, str) and value not in TEXT_WORDS and str(Path(value)) in TEXT_WORDS:
        return os.path.abspath(value)
    return value


def _listed(value: object) -> object:
    """Numbers as command lines have them: 0.5,0.5, or one of a repeated flag."""
    if not isinstance(value, str | list | tuple):
        return value
    words = [value] if isinstance(value, str) else value
    try:
        return tuple(float(part) for word in words for part in str(word).split(","))
    except ValueError:
        raise option_refusal(f"{value!r} is no list of numbers", "write 0.5,0.5") from None


# Strict scalars (no "5" for 5, no True for 1) inside sequences and paths that YAML can write.
PathValue = Annotated[Path, Field(strict=False), BeforeValidator(_apart_from_words)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Weights = Annotated[tuple[Weight, ...], Field(strict=False), BeforeValidator(_listed)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def section_in(kind: Any) -> type[BaseModel] | None:
    """The section that a field of this type holds, also an optional or a repeated one."""
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None
