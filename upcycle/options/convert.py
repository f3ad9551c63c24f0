"""The options of a conversion."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from upcycle.errors import PlanError
from upcycle.options.base import Bytes, NonNegative, PathValue, Positive, Seed
from upcycle.options.stage import StageOptions, Written


class MergeOptions(StageOptions):
    """How heads are merged, to whichever number of them."""

    error: ClassVar = PlanError

    method: str | None = None
    """How a group of KV heads becomes one; by default mean, or lowrank with calibration text."""
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False)] = ()
    """Text to measure on: a file, a folder, or builtin for the package's own."""
    calibration_tokens: Positive = 32_768
    """Tokens of that text to use, in sequences of 512."""
    refine: NonNegative = 0
    """Optimiser steps that fit each layer's new attention to the source's on that text."""
    grouping: Literal["contiguous", "search"] = "contiguous"
    """Which heads become one: contiguous, or search for those that lose least together."""
    device: Annotated[str, Written(noted=False)] = "auto"
    """Where layers are measured and refined: auto, cpu, cuda or mps."""
    seed: Seed = 0
    """Seed of methods that draw, of the choice of text and of the order of refinement."""
    dtype: str | None = None
    """How a model that changes its class is stored: float16, bfloat16, float32 or float64."""
    max_shard_size: Bytes | None = None
    """The most bytes of tensors in an output file, such as 5GB; by default files are cut like the
    source's."""
    allow_nonfinite: bool = False
    """Merge NaN and infinity too, instead of refusing them; not with calibration text."""
    drop_extra_attention: bool = False
    """Leave out multi-token prediction and whatever else has attention outside the decoder's
    layers, instead of merging it like one of them."""
    sha256: Annotated[bool, Written(noted=False)] = False
    """Also record SHA-256 of the source's weights."""
    strict: Annotated[bool, Written(noted=False)] = False
    """Refuse tensors that transformers' class names or shapes otherwise, and an auto_map (exit
    code 1), instead of warning of them."""

    @property
    def method_name(self) -> str:
        """The method's name, also where none is named."""
        return self.method or ("lowrank" if self.calibration else "mean")


class _Target(StageOptions):
    kv_heads: int
    """KV heads of the converted model, g."""


class ConvertOptions(MergeOptions, _Target):  # the fields of the last base come first
    """What is made of a checkpoint."""

    def noted(self) -> dict[str, Any]:
        """What a manifest notes; the number of tokens means nothing without text."""
        tokens = self.calibration_tokens if self.calibration else None
        return {**super().noted(), "method": self.method_name, "calibration_tokens": tokens}
