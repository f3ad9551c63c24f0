"""The options of an export."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from upcycle.byte_sizes import parse_bytes
from upcycle.errors import UpcycleError
from upcycle.options.attention_forms import QFOLD, FormName
from upcycle.options.base import (
    BUILTIN,
    PathValue,
    Positive,
    Section,
)


def _size(value: object) -> object:
    """The bytes of a size in words."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, where="chunk_size")
    except UpcycleError as error:
        raise ValueError(f"{error.what}; {error.fix}") from error


class ExportRecipe(Section):
    """The Core ML package.

    Attributes:
        context: tokens that the KV cache holds.
        prefill: tokens per call of a second function; absent means none.
        attention: fold the queries into groups, or repeat the keys and values.
        kv_cache: in states, or in and out.
        conv: make linear layers 1x1 convolutions.
        split_head: parts of the output head.
        argmax: give the likeliest next token too.
        quantize: a preset or a YAML file; absent means fp16.
        untie: store a tied output matrix apart from the embedding.
        chunk_size: weights that a package may have, such as "1GB"; absent means one of any size.
        calibration: text that tells which layers need more bits.
    """

    context: Positive
    prefill: Annotated[int, Field(ge=2)] | None = None
    attention: FormName = QFOLD.name
    kv_cache: Literal["state", "read-only"] = "state"
    conv: bool = False
    split_head: Positive = 1
    argmax: bool = False
    quantize: str | None = None
    untie: bool = False
    chunk_size: Annotated[int, BeforeValidator(_size)] | None = None
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False)] = (Path(BUILTIN),)
