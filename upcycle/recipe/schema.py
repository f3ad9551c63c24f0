"""What a recipe may say. Frozen, typed, and closed: an unknown key is an error."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from upcycle.errors import UpcycleError
from upcycle.kvcache.sizes import parse_bytes

BUILTIN = "builtin"  # as calibration text: the text that comes with the package
# Strict scalars (no "5" for 5, no True for 1) inside sequences and paths that YAML can write.
PathValue = Annotated[Path, Field(strict=False)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ConvertRecipe(Section):
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


class TextSource(Section):
    """One file, or one folder of files, to train on.

    Attributes:
        path: .txt, .md, .py (one document), .jsonl or .parquet (one document per row).
    """

    path: PathValue


class ChatRecipe(Section):
    """How rows with chats are trained on.

    Attributes:
        assistant_only: put the loss on the assistant's tokens alone, which needs a chat template
            with `{% generation %}` tags.
    """

    assistant_only: bool = False


class DataRecipe(Section):
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
    chat: ChatRecipe = ChatRecipe()


class TrainRecipe(Section):
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

    data: DataRecipe
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


class Margins(Section):
    """What the uptrained model may lose against the source; a breach is exit code 1.

    Attributes:
        kl_mean: mean KL(source || model), nats per token.
        nll_increase: mean negative log-likelihood above the source's, nats per token.
    """

    kl_mean: Weight | None = None
    nll_increase: Weight | None = None


class EvaluateRecipe(Section):
    """What source, converted and uptrained are compared on.

    Attributes:
        text: files of held-out text; none means the packaged text.
        max_tokens: scored tokens at most, spread over the documents.
        sequence_length: tokens of context at most.
        prompts: continued greedily by each model.
        new_tokens: tokens per continuation.
        max_bad_share: the share of a text file's rows that may be unusable, as in `train.data`.
        margins: what may be lost.
    """

    text: Annotated[tuple[PathValue, ...], Field(strict=False)] = ()
    max_tokens: Positive = 40_000
    sequence_length: Annotated[int, Field(ge=2)] = 512
    prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    new_tokens: Positive = 48
    max_bad_share: Share = 0.01
    margins: Margins = Margins()


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
    attention: Literal["qfold", "repeat-kv"] = "qfold"
    kv_cache: Literal["state", "read-only"] = "state"
    conv: bool = False
    split_head: Positive = 1
    argmax: bool = False
    quantize: str | None = None
    untie: bool = False
    chunk_size: Annotated[int, BeforeValidator(_size)] | None = None
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False)] = (Path(BUILTIN),)


class Recipe(Section):
    """A whole run.

    Attributes:
        source: the MHA checkpoint: an absolute folder once loaded, or a Hub id.
        output: the folder of every result.
        convert: how heads are merged.
        train: the uptraining; absent means none.
        evaluate: the comparison.
        export: the Core ML package; absent means none.
    """

    source: str
    output: PathValue
    convert: ConvertRecipe
    train: TrainRecipe | None = None
    evaluate: EvaluateRecipe = EvaluateRecipe()
    export: ExportRecipe | None = None

    @property
    def texts(self) -> list[Path]:
        """Every file or folder of text that the recipe reads."""
        trained_on = () if self.train is None else self.train.data.sources
        measured_on = () if self.export is None else self.export.calibration
        measured_on += self.convert.calibration
        calibration = (path for path in measured_on if str(path) != BUILTIN)
        own = (source.path for source in trained_on)
        return [*calibration, *own, *self.evaluate.text]
