"""The options of a conversion."""

from typing import Annotated, Literal

from pydantic import Field

from upcycle.options.base import NonNegative, PathValue, Positive, Section, Seed


class ConvertOptions(Section):
    """How the source's heads are merged.

    Attributes:
        kv_heads: KV heads of the converted model.
        method: a conversion method's registered name; `mean`, or `lowrank` with calibration.
        calibration: text to measure on; "builtin" is a short text that comes with the package.
        calibration_tokens: how many tokens of it.
        refine: optimiser steps that fit each layer's attention to the source's.
        grouping: "contiguous" or "search".
        seed: for methods that draw numbers, and the choice of calibration text.
        drop_extra_attention: leave out multi-token prediction and whatever else has attention
            outside the decoder's layers, instead of merging it like one of them.
    """

    kv_heads: Positive
    method: str | None = None
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False)] = ()
    calibration_tokens: Positive = 32_768
    refine: NonNegative = 0
    grouping: Literal["contiguous", "search"] = "contiguous"
    seed: Seed = 0
    drop_extra_attention: bool = False
