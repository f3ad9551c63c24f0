"""The options of a comparison."""

from typing import Annotated, ClassVar

from pydantic import Field

from upcycle.errors import EvaluationError
from upcycle.options.base import (
    MAX_BAD_SHARE,
    Dtype,
    PathValue,
    Positive,
    Section,
    Share,
    Weight,
)
from upcycle.options.stage import StageOptions, Written


class Margins(Section):
    """What the uptrained model may lose against the source; a breach is exit code 1."""

    kl_mean: Weight | None = None
    """Mean KL(source || model), nats per token."""
    nll_increase: Weight | None = None
    """Mean negative log-likelihood above the source's, nats per token."""


class EvaluateOptions(StageOptions):
    """What source, converted and uptrained are compared on."""

    error: ClassVar = EvaluationError

    text: Annotated[tuple[PathValue, ...], Field(strict=False), Written(noted=False)] = ()
    """Held-out text: .txt, .jsonl, .parquet; by default the packaged text."""
    prompts: Annotated[tuple[str, ...], Field(strict=False), Written(flag="prompt")] = ()
    """Continue this greedily with every model."""
    max_tokens: Positive = 40_000
    """The most tokens to score, spread over the documents."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """The most tokens per window."""
    new_tokens: Positive = 48
    """The most tokens per continuation."""
    max_bad_share: Share = MAX_BAD_SHARE
    """The share of a text file's rows that may be unusable, as in `train.data`."""
    margins: Margins = Margins()
    """What may be lost; only a recipe can say it."""
    device: Annotated[str, Written(noted=False)] = "auto"
    """Where the models run: auto, cpu, cuda or mps."""
    dtype: Dtype = "float32"
    """Dtype of weights and arithmetic: float32, which keeps the noise floor near zero, bfloat16 or
    float16."""


DEFAULTS = EvaluateOptions()
