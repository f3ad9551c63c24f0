"""The options of an uptraining."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from upcycle.errors import TrainingError
from upcycle.options.base import (
    MAX_BAD_SHARE,
    Beta,
    NonNegative,
    PathValue,
    Positive,
    Rate,
    Section,
    Seed,
    Share,
    Weight,
)
from upcycle.options.stage import StageOptions, Written

_FREE = Written(noted=False)  # touches the weights by rounding at most: a resumed run may change it


class TextSource(Section):
    """One file, or one folder of files, to train on; its bare path says the same."""

    path: PathValue
    """.txt, .md, .py (one document), .jsonl or .parquet (one document per row)."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str | Path) else value


class ChatOptions(Section):
    """How rows with chats are trained on."""

    assistant_only: bool = False
    """Put the loss on the assistant's tokens alone, which needs a chat template with
    `{% generation %}` tags."""


class DataOptions(Section):
    """The text to train on."""

    sources: Annotated[tuple[TextSource, ...], Field(strict=False, min_length=1)]
    """Read in this order."""
    text_column: str | None = None
    """The column or key that holds plain text, used before a chat of the same row; absent means
    `text`, used where a row has no chat."""
    max_bad_share: Share = MAX_BAD_SHARE
    """The share of a file's rows that may be unusable: no JSON, not UTF-8, refused by the chat
    template. Up to 3 rows, but no more than a tenth, always may; 0 allows none."""
    chat: ChatOptions = ChatOptions()
    """For rows with `messages`, `conversations`, or `prompt` and `completion`."""


class TrainOptions(StageOptions):
    """The uptraining run."""

    error: ClassVar = TrainingError

    data: Annotated[DataOptions, Written(noted=False)]
    """The text."""
    teacher: Annotated[str | None, Written(noted=False)] = None
    """A checkpoint to learn from instead of the source, a folder or a Hub id."""
    sequence_length: Annotated[int, Field(ge=2)]
    """Tokens per packed row."""
    batch_size: Positive
    """Rows per optimiser step, over all processes."""
    micro_batch_size: Annotated[Positive, _FREE]
    """Rows per forward pass of one process."""
    steps: Positive | None = None
    """Optimiser steps; or give `fraction` and `source_steps`."""
    fraction: Annotated[float | None, Field(gt=0, le=1), _FREE] = None
    """Optimiser steps as a share of `source_steps`; manifests note the `steps`."""
    source_steps: Annotated[Positive | None, _FREE] = None
    """Optimiser steps that the source was trained for."""
    learning_rate: Rate
    """The peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The shape after the warm-up, a pure function of the step."""
    warmup_steps: NonNegative = 0
    """Linear from zero to the peak."""
    cross_entropy: Weight = 0.0
    """Weight of the next-token loss."""
    distillation: Weight = 1.0
    """Weight of KL(source || student)."""
    temperature: Rate = 1.0
    """Of both distributions in the distillation loss."""
    trainable: Literal["all", "attention", "kv"] = "all"
    """Which weights move: everything, the attention layers, or their K and V alone."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 autocast over fp32 master weights, or fp32."""
    weight_decay: Weight = 0.0
    """AdamW's, on matrices only."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """AdamW's."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    checkpoint_every: Annotated[Positive, _FREE] = 500
    """Steps between saved training states."""
    keep_last: Annotated[Positive, _FREE] = 2
    """Training states kept."""
    evaluate_every: Annotated[Positive, _FREE] = 100
    """Steps between held-out losses in the log."""
    seed: Seed = 0
    """Of the data order."""

    @property
    def texts(self) -> list[Path]:
        """The files and folders of text to train on."""
        return [source.path for source in self.data.sources]

    @property
    def num_steps(self) -> int:
        """Optimiser steps, at least one, whichever way they were given."""
        if self.steps is not None:
            return self.steps
        assert self.fraction is not None and self.source_steps is not None  # noqa: PT018
        return max(1, round(self.fraction * self.source_steps))

    def contradictions(self) -> list[str]:
        """What cannot be asked for together, in words."""
        problems = []
        by_fraction = (self.fraction is not None, self.source_steps is not None)
        if any(by_fraction) != all(by_fraction) or (self.steps is not None) == all(by_fraction):
            problems.append(
                "give either steps, or fraction and source_steps together "
                f"(steps: {self.steps}, fraction: {self.fraction}, "
                f"source_steps: {self.source_steps}; null unsets one)"
            )
        elif self.warmup_steps > self.num_steps:
            problems.append(
                f"warmup_steps ({self.warmup_steps}) must not exceed the {self.num_steps} steps"
            )
        if self.batch_size % self.micro_batch_size:
            problems.append(
                f"batch_size ({self.batch_size}) must be a multiple of "
                f"micro_batch_size ({self.micro_batch_size})"
            )
        if self.cross_entropy == 0 and self.distillation == 0:
            problems.append("cross_entropy and distillation must not both be 0")
        return problems
