"""The options of an export."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from upcycle.errors import ExportError
from upcycle.options.attention_forms import FORMS_HELP, QFOLD, FormName
from upcycle.options.base import BUILTIN, Bytes, PathValue, option_refusal
from upcycle.options.stage import StageOptions, Written

STATE, READ_ONLY = "state", "read-only"
MAX_HEAD_PARTS = 64  # each is an operation of its own; the largest vocabularies want 16
CONTEXT_MULTIPLE = 32  # the Neural Engine wants state dimensions in multiples of it


class ExportOptions(StageOptions):
    """What is made of a checkpoint for Core ML or Core AI."""

    error: ClassVar = ExportError

    context: int = 512
    """Positions that the KV cache holds, a multiple of 32, at most the model's."""
    prefill: int | None = None
    """Tokens per call of a second function `prefill`, such as 64; less than the context."""
    attention: Annotated[FormName, Field(description=FORMS_HELP)] = QFOLD.name
    kv_cache: Literal["state", "read-only"] = "state"
    """state keeps K and V in states; read-only takes those of the past as inputs and gives the new
    ones as outputs."""
    conv: bool = False
    """Make linear layers 1x1 convolutions."""
    split_head: int = 1
    """Parts that the output head is split into, up to 64; one that shares the embedding's table is
    stored again."""
    argmax: bool = False
    """Give the likeliest next token beside the logits: an output `nextToken` [1, T] int32."""
    quantize: str | None = None
    """int8, int4, lut4, lut6, lut8, mixed, top8, top12, or a YAML file that says how weights are
    stored; else fp16."""
    untie: bool = False
    """With quantised weights: give a tied output matrix a scheme of its own, as in mixed."""
    chunk_size: Bytes | None = None
    """Cut the layers into packages of at most this many bytes of weights each, such as
    1GB, in a folder."""
    calibration: Annotated[tuple[PathValue, ...], Field(strict=False), Written(noted=False)] = (
        Path(BUILTIN),
    )
    """Text that tells which layers need more bits, where a scheme asks: a file, a folder or
    builtin."""

    def noted(self) -> dict[str, Any]:
        """What a manifest notes; of a scheme the preset, or its file's name without the folder."""
        scheme = None if self.quantize is None else Path(self.quantize).name
        return {**super().noted(), "quantize": scheme}

    @field_validator("context")
    @classmethod
    def _fills_tiles(cls, context: int) -> int:
        if context < CONTEXT_MULTIPLE or context % CONTEXT_MULTIPLE:
            raise option_refusal(
                f"context {context} is not a positive multiple of {CONTEXT_MULTIPLE}",
                f"pass {max(1, round(context / CONTEXT_MULTIPLE)) * CONTEXT_MULTIPLE}",
            )
        return context

    @field_validator("prefill")
    @classmethod
    def _leaves_room(cls, prefill: int | None, info: ValidationInfo) -> int | None:
        context = info.data.get("context")  # absent where it is refused itself
        if prefill is not None and context is not None and not 1 < prefill < context:
            raise option_refusal(
                f"prefill {prefill} is not between 2 and the context of {context}",
                f"pass {min(64, context // 2)}, or omit it to decode only",
            )
        return prefill

    @field_validator("split_head")
    @classmethod
    def _is_countable(cls, parts: int) -> int:
        if not 1 <= parts <= MAX_HEAD_PARTS:
            raise option_refusal(
                f"the output head cannot have {parts} parts",
                f"pass 8, at most {MAX_HEAD_PARTS}, or omit it",
            )
        return parts


DEFAULTS = ExportOptions()
