"""What can be asked of an export, whatever its target."""

from dataclasses import dataclass

from upcycle.errors import ExportError
from upcycle.export.attention import QFOLD
from upcycle.export.loading import CONTEXT_MULTIPLE, DECODERS, IMPLEMENTATIONS, STATE


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        context: C, the positions of the KV cache, a multiple of 32, at most the model's.
        prefill: T, the tokens per call of a second function `prefill`; None makes none.
        attention: "qfold" never copies K and V; "repeat-kv" copies them to all query heads, for
            comparison.
        kv_cache: "state" keeps K and V in Core ML states; "read-only" takes those of the past as
            inputs and gives the new ones as outputs.
        conv: whether linear layers become 1x1 convolutions.
        split_head: how many parts the output head has; one that shares the embedding's table is
            stored again.
        argmax: whether there is an output `nextToken` [1, T] int32, the likeliest, beside the
            logits.
        quantize: a preset or a YAML file that says how weights are stored; None keeps fp16.
        untie: whether an output matrix that is the embedding's gets a scheme of its own.
    """

    context: int = 512
    prefill: int | None = None
    attention: str = QFOLD
    kv_cache: str = STATE
    conv: bool = False
    split_head: int = 1
    argmax: bool = False
    quantize: str | None = None
    untie: bool = False


def check_options(options: ExportOptions) -> None:
    """Refuse what no target can do.

    Raises:
        ExportError: an option has a value that it cannot have.
    """
    for option, asked, known in (
        ("--attention", options.attention, IMPLEMENTATIONS),
        ("--kv-cache", options.kv_cache, DECODERS),
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
    if options.split_head < 1:
        raise ExportError(
            f"the output head cannot have {options.split_head} parts",
            where="--split-head",
            fix="pass 8, or leave it out",
        )
