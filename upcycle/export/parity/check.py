"""Compare an exported package with the checkpoint that it was made of, by running it here."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from upcycle.checkpoint.loading import load_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.interpreter.run import Interpreter
from upcycle.export.parity.apple import CoreMLRunner, has_core_ml
from upcycle.export.parity.logits import Difference, compare_logits
from upcycle.export.parity.overflow import OverflowProbe
from upcycle.export.parity.program import Outputs, Program, run_program
from upcycle.export.parity.reference import Reference, reference_of
from upcycle.export.parity.results import Arithmetic, ExportCheck
from upcycle.export.parity.rules import rules
from upcycle.export.parity.text import read_tokens
from upcycle.progress import Progress, Watcher, ignore

_HALF = {"fp32": False, "fp16": True}
_SHOWN = 5  # operations with the largest results


def check_export(
    checkpoint: str | Path,
    package: str | Path,
    *,
    text: Sequence[Path] = (),
    tokens: int = 64,
    max_kl: float | None = None,
    against: str | Path | None = None,
    watch: Watcher = ignore,
) -> ExportCheck:
    """Run a package on a text, in fp32 and fp16, and compare its logits with the checkpoint's.

    On a Mac Core ML runs its decoding function too.

    Args:
        checkpoint: what the package was made of.
        package: of `upcycle export`.
        text: files; the packaged held-out text where there are none.
        tokens: of prefill, and as many again of decoding; fewer where the context is shorter.
        max_kl: largest mean KL to the whole checkpoint that passes, nats.
        against: another package of the same checkpoint, compared with this one too.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no tokenizer.
        DataError: the text cannot be read, or is too short.
        ExportError: a package is damaged, was not made by `upcycle export`, or holds something
            that the interpreter does not know.
    """
    opened = Checkpoint.open(checkpoint)
    program = Program.read(Path(package))
    other = None if against is None else Program.read(Path(against))
    context = min(each.context for each in (program, other) if each)
    ids = read_tokens(opened.folder, text, min(2 * tokens, context))
    watch(Progress("check-export", 0, 1, "steps", "torch"))
    # The model is gone when the program runs.
    reference = reference_of(
        load_model(opened.folder, dtype=torch.float32, attention="eager"), program, ids
    )
    return check_program(reference, program, ids, max_kl=max_kl, against=other, watch=watch)


def check_program(
    reference: Reference,
    program: Program,
    tokens: Tensor,
    *,
    max_kl: float | None = None,
    against: Program | None = None,
    watch: Watcher = ignore,
) -> ExportCheck:
    """The same for a reference on tokens [N].

    Raises:
        ExportError: the interpreter does not know an operation.
    """
    steps = count(1)
    last = len(_HALF) * (2 if against else 1) + has_core_ml() + 1

    def step(note: str) -> None:
        watch(Progress("check-export", next(steps), last, "steps", note))

    found, prefilled = [], 0
    for name, half in _HALF.items():
        probe = OverflowProbe(program.graph.functions.values())
        step(f"{name} arithmetic")
        outputs = run_program(
            program, Interpreter(program.loaded, half=half, observe=probe.observe), tokens
        )
        other = None
        if against is not None:
            step(f"{name} arithmetic, the other package")
            other = run_program(against, Interpreter(against.loaded, half=half), tokens)
        prefilled = outputs.prefilled
        found.append(_compared(name, reference, outputs, other, probe))
    if has_core_ml():
        step("Core ML")
        decoding = program.only_decode()
        runner = CoreMLRunner(program.package, stateful=bool(program.graph.decode.states))
        found.append(_compared("Core ML", reference, run_program(decoding, runner, tokens)))
    step("")
    checks = [check for each in found for check in rules(each, max_kl)]
    return ExportCheck(found, checks, len(tokens), prefilled, reference.replaced)


def _compared(
    name: str,
    reference: Reference,
    outputs: Outputs,
    other: Outputs | None = None,
    probe: OverflowProbe | None = None,
) -> Arithmetic:
    return Arithmetic(
        name=name,
        text=compare_logits(reference.own.text, outputs.text),
        end=compare_logits(reference.own.end, outputs.end),
        prefill=_prefill_difference(outputs),
        caches=None if outputs.caches is None else float(outputs.caches.max()),
        typical_caches=None if outputs.caches is None else float(outputs.caches.median()),
        full=compare_logits(reference.full.text, outputs.text),
        against=compare_logits(other.text, outputs.text) if other else None,
        largest=probe.top(_SHOWN) if probe else [],
        overflowed=probe.overflowed if probe else [],
    )


def _prefill_difference(outputs: Outputs) -> Difference | None:
    if outputs.decoded is None:
        return None
    return compare_logits(outputs.decoded, outputs.text[: len(outputs.decoded)])
