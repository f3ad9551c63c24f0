"""The options of a conversion."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from upcycle.errors import PlanError
from upcycle.options.base import SELF, Bytes, NonNegative, PathValue, Positive, Seed, Weights
from upcycle.options.stage import StageOptions, Written


class MergeOptions(StageOptions):
    """How heads are merged, to whichever number of them."""

    error: ClassVar = PlanError

    method: str | None = None
    """How a group of KV heads becomes one; by default mean, or lowrank with calibration text."""
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False)] = ()
    """Text to measure on: a file, a folder, builtin for the package's own, or self for what the
    source writes itself (chats, where it has a chat template), which stays in
    OUT.calibration.jsonl."""
    calibration_weights: Weights = ()
    """The shares of the tokens that the texts give, in their order, such as 0.5,0.5; by default
    files are read as one text, and self gives as much as each of them."""
    calibration_tokens: Positive = 32_768
    """Tokens of text to use, in windows."""
    calibration_window: Annotated[int, Field(ge=2)] = 512
    """Tokens of a window, which bounds how far attention is seen to look."""
    refine: NonNegative = 0
    """Optimiser steps that fit each layer's new attention to the source's on that text."""
    refine_precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """What refinement computes in, over fp32 weights; auto is bf16 on a CPU that multiplies it
    faster, which takes about half the time, and fp32 elsewhere."""
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
    def own_text(self) -> bool:
        """Whether the source writes some of the text."""
        return Path(SELF) in self.calibration

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each text; empty where all are read as one."""
        if len(self.calibration) < 2:
            return ()
        return self.calibration_weights or (1.0,) * (self.own_text * len(self.calibration))

    def contradictions(self) -> list[str]:
        """What cannot be asked for together, in words."""
        problems = []
        texts, weights = len(self.calibration), self.calibration_weights
        if weights and len(weights) != texts:
            problems.append(
                f"calibration_weights has {len(weights)} values, and there are {texts} calibration "
                "texts: give one for each"
            )
        if weights and min(weights) <= 0:
            problems.append("calibration_weights must be above 0: omit a text instead")
        if self.calibration.count(Path(SELF)) > 1:
            problems.append("calibration can be self only once")
        return problems

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
        """What a manifest notes; how much text is read means nothing where there is none."""
        noted = {**super().noted(), "method": self.method_name}
        unread = () if self.calibration else ("calibration_tokens", "calibration_window")
        return {**noted, **dict.fromkeys(unread)}
