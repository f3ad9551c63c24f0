"""What can be asked of an export, whatever its target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upcycle.errors import ExportError
from upcycle.options.attention_forms import FORMS, QFOLD
from upcycle.program.signature import DECODE, PREFILL

STATE, READ_ONLY = "state", "read-only"
MAX_HEAD_PARTS = 64  # each is an operation of its own; the largest vocabularies want 16
CONTEXT_MULTIPLE = 32  # the Neural Engine wants state dimensions in multiples of it


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        context: C, the positions of the KV cache, a multiple of 32, at most the model's.
        prefill: T, the tokens per call of a second function `prefill`; None makes none.
        attention: the name of one of `FORMS`.
        kv_cache: "state" keeps K and V in Core ML states; "read-only" takes those of the past as
            inputs and gives the new ones as outputs.
        conv: whether linear layers become 1x1 convolutions.
        split_head: how many parts the output head has, at most 64; one that shares the embedding's
            table is stored again.
        argmax: whether there is an output `nextToken` [1, T] int32, the likeliest, beside the
            logits.
        quantize: a preset or a YAML file that says how weights are stored; None keeps fp16.
        untie: whether an output matrix that is the embedding's gets a scheme of its own.
        chunk_size: bytes of weights that a package may have; the model's layers are cut into so
            many packages. None makes one of any size.
    """

    context: int = 512
    prefill: int | None = None
    attention: str = QFOLD.name
    kv_cache: str = STATE
    conv: bool = False
    split_head: int = 1
    argmax: bool = False
    quantize: str | None = None
    untie: bool = False
    chunk_size: int | None = None

    @property
    def functions(self) -> Mapping[str, int]:
        """How many tokens each function takes per call, by its name."""
        return {DECODE: 1} | ({} if self.prefill is None else {PREFILL: self.prefill})


DEFAULTS = ExportOptions()


def check_target(output: Path, suffix: str, options: ExportOptions) -> None:
    """Refuse what no target can do.

    Args:
        output: what to make.
        suffix: of the names of what the target makes; chunks go into a folder.
        options: what is asked of it.

    Raises:
        ExportError: the output has another suffix, or an option a value that it cannot have.
    """
    # What begins with a dot is hidden, or no name of its own.
    stem = "model" if output.name.startswith(".") or not output.name else output.stem
    if options.chunk_size is not None and output.suffix == suffix:
        raise ExportError(
            f"chunks go into a folder, and {output.name} is named like one {suffix}",
            where=str(output),
            fix=f"name it {stem}, or leave --chunk-size away",
        )
    if options.chunk_size is None and output.suffix != suffix:
        nameless = output.name in ("", "..", suffix)
        raise ExportError(
            f"{output} names no package" if nameless else f"{output.name} does not end in {suffix}",
            where=str(output),
            fix=f"name it {stem}{suffix}",
        )
    for option, asked, known in (
        ("--attention", options.attention, FORMS),
        ("--kv-cache", options.kv_cache, (STATE, READ_ONLY)),
    ):
        if asked not in known:
            raise ExportError(
                f"unknown {option[2:]} {asked!r}", where=option, fix=f"choose {' or '.join(known)}"
            )
    context, prefill = options.context, options.prefill
    if context < CONTEXT_MULTIPLE or context % CONTEXT_MULTIPLE:
        raise ExportError(
            f"context {context} is no positive multiple of {CONTEXT_MULTIPLE}",
            where="--context",
            fix=f"pass {max(1, round(context / CONTEXT_MULTIPLE)) * CONTEXT_MULTIPLE}",
        )
    if prefill is not None and not 1 < prefill < context:
        raise ExportError(
            f"prefill {prefill} is not between 2 and the context of {context}",
            where="--prefill",
            fix=f"pass {min(64, context // 2)}, or leave it out to decode only",
        )
    if options.untie and options.quantize is None:
        raise ExportError(
            "there is nothing to untie in fp16",
            where="--untie",
            fix="pass --quantize too, or leave --untie away",
        )
    if not 1 <= options.split_head <= MAX_HEAD_PARTS:
        raise ExportError(
            f"the output head cannot have {options.split_head} parts",
            where="--split-head",
            fix=f"pass 8, at most {MAX_HEAD_PARTS}, or leave it out",
        )
