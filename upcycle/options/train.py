"""The options of an uptraining."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from upcycle.options.base import (
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


class TextSource(Section):
    """One file, or one folder of files, to train on; its bare path says the same.

    Attributes:
        path: .txt, .md, .py (one document), .jsonl or .parquet (one document per row).
    """

    path: PathValue

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str | Path) else value


class ChatOptions(Section):
    """How rows with chats are trained on.

    Attributes:
        assistant_only: put the loss on the assistant's tokens alone, which needs a chat template
            with `{% generation %}` tags.
    """

    assistant_only: bool = False


class DataOptions(Section):
    """The text to train on.

    Attributes:
        sources: read in this order.
        text_column: the column or key that holds plain text, used before a chat of the same row;
            absent means `text`, used where a row has no chat.
        max_bad_share: the share of a file's rows that may be unusable: no JSON, not UTF-8, refused
            by the chat template. At most 3 and a tenth of them may be in any case; 0 lets none.
        chat: for rows with `messages`, `conversations`, or `prompt` and `completion`.
    """

    sources: Annotated[tuple[TextSource, ...], Field(strict=False, min_length=1)]
    text_column: str | None = None
    max_bad_share: Share = 0.01
    chat: ChatOptions = ChatOptions()


class TrainOptions(Section):
    """The uptraining run.

    Attributes:
        data: the text.
        teacher: a checkpoint to learn from instead of the source, a folder or a Hub id.
        sequence_length: tokens per packed row.
        batch_size: rows per optimiser step, over all processes.
        micro_batch_size: rows per forward pass of one process.
        steps: optimiser steps; or give `fraction` and `source_steps`.
        fraction: optimiser steps as a share of `source_steps`.
        source_steps: optimiser steps that the source was trained for.
        learning_rate: the peak.
        schedule: the shape after the warm-up, a pure function of the step.
        warmup_steps: linear from zero to the peak.
        cross_entropy: weight of the next-token loss.
        distillation: weight of KL(source || student).
        temperature: of both distributions in the distillation loss.
        trainable: which weights move: everything, the attention layers, or their K and V alone.
        precision: bf16 autocast over fp32 master weights, or fp32.
        weight_decay: AdamW's, on matrices only.
        betas: AdamW's.
        max_grad_norm: gradients are scaled down to this norm.
        checkpoint_every: steps between saved training states.
        keep_last: training states kept.
        evaluate_every: steps between held-out losses in the log.
        seed: of the data order.
    """

    data: DataOptions
    teacher: str | None = None
    sequence_length: Annotated[int, Field(ge=2)]
    batch_size: Positive
    micro_batch_size: Positive
    steps: Positive | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    source_steps: Positive | None = None
    learning_rate: Rate
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegative = 0
    cross_entropy: Weight = 0.0
    distillation: Weight = 1.0
    temperature: Rate = 1.0
    trainable: Literal["all", "attention", "kv"] = "all"
    precision: Literal["bf16", "fp32"] = "bf16"
    weight_decay: Weight = 0.0
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    max_grad_norm: Rate = 1.0
    checkpoint_every: Positive = 500
    keep_last: Positive = 2
    evaluate_every: Positive = 100
    seed: Seed = 0

    @property
    def num_steps(self) -> int:
        """Optimiser steps, at least one, whichever way they were given."""
        if self.steps is not None:
            return self.steps
        assert self.fraction is not None and self.source_steps is not None  # noqa: PT018
        return max(1, round(self.fraction * self.source_steps))

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
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
        if problems:
            raise ValueError("; ".join(problems))
        return self
