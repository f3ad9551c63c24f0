"""Compare an exported package with the checkpoint that it was made of, by running it here."""

import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from torch import Tensor, nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checks import Check
from upcycle.interpreter.failure import ProgramError
from upcycle.interpreter.interpreter import Interpreter
from upcycle.parity.apple import has_core_ml
from upcycle.parity.chain import core_ml_runner
from upcycle.parity.logits import compare_logits, shaky_positions
from upcycle.parity.overflow import OverflowProbe
from upcycle.parity.program import Outputs, Program, run_program, text_length
from upcycle.parity.reference import Reference, load_reference, reference_of
from upcycle.parity.results import Arithmetic, ExportCheck
from upcycle.parity.rules import LIMITS, rules
from upcycle.parity.text import read_tokens
from upcycle.program.signature import DECODE
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
        tokens: of prefill, and as many again of decoding; see `text_length`.
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
    programs = [each for each in (program, other) if each]
    ids = read_tokens(opened.folder, text, text_length(programs, tokens))
    watch(Progress("check-export", 0, 1, "steps", "torch"))
    # The model is gone when the program runs.
    reference = program_reference(load_reference(opened, program), program, ids)
    return check_program(reference, program, ids, max_kl=max_kl, against=other, watch=watch)


def program_reference(model: nn.Module, program: Program, tokens: Tensor) -> Reference:
    """What a program must give for tokens [N]; its model's numbers are replaced.

    Raises:
        ExportError: a compressed weight of the program is not one of the model's.
    """
    return reference_of(model, tokens, program.end, program.loaded.compressed_weights(DECODE))


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

    found, broken, prefilled = [], [], 0
    for name, half in _HALF.items():
        probe = OverflowProbe(program.graph.functions.values())
        step(f"{name} arithmetic")
        other = None
        try:
            outputs = run_program(
                program, Interpreter(program.loaded, half=half, observe=probe.observe), tokens
            )
            if against is not None:
                step(f"{name} arithmetic, the other package")
                other = run_program(against, Interpreter(against.loaded, half=half), tokens)
        except ProgramError as error:
            broken.append(Check(f"{name}: the program runs", 1, 0, f"{error.where}: {error.what}"))
            continue
        prefilled = outputs.prefilled
        found.append(compared(name, reference, outputs, other, probe, exact=not half))
    if has_core_ml():
        step("Core ML")
        decoding = program.only_decode()
        outputs = run_program(decoding, core_ml_runner(program.path), tokens)
        found.append(compared("Core ML", reference, outputs))
    step("")
    compressed = bool(reference.replaced)
    checks = [check for each in found for check in rules(each, max_kl, compressed=compressed)]
    return ExportCheck(found, broken + checks, len(tokens), prefilled, reference.replaced)


def compared(
    name: str,
    reference: Reference,
    outputs: Outputs,
    other: Outputs | None = None,
    probe: OverflowProbe | None = None,
    *,
    exact: bool = False,
) -> Arithmetic:
    """How a program did.

    Args:
        name: of the arithmetic.
        reference: what it must give.
        outputs: what it gave.
        other: what another package gave on the same tokens.
        probe: what was seen of its operations.
        exact: whether it computed in fp32.
    """
    full, own = reference.full, reference.own
    text = end = None
    if not exact:
        text = shaky_positions(own.text, (each.text for each in reference.shaken), LIMITS[exact])
        end = shaky_positions(own.end, (each.end for each in reference.shaken), LIMITS[exact])
    # Compressed weights are meant to be far off, and have no limit of their own here.
    rounded = None
    if not reference.replaced:
        rounded = shaky_positions(full.text, [own.text], LIMITS[exact])
    prefilled = outputs.prefilled
    shaky = None if text is None else text[:prefilled]
    caches = outputs.caches
    if caches is not None and shaky is not None:
        caches = caches[~shaky]
    return Arithmetic(
        name=name,
        exact=exact,
        text=compare_logits(own.text, outputs.text, text),
        end=compare_logits(own.end, outputs.end, end),
        prefill=None
        if outputs.decoded is None
        else compare_logits(outputs.decoded, outputs.text[:prefilled], shaky),
        caches=None if caches is None else max(caches.tolist(), default=math.inf),
        full=compare_logits(full.text, outputs.text, rounded),
        against=compare_logits(other.text, outputs.text, text) if other else None,
        largest=probe.top(_SHOWN) if probe else [],
        overflowed=probe.overflowed if probe else [],
    )
