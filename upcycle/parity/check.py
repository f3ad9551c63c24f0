"""Compare what `upcycle export` made with the checkpoint that it was made of, by running it."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checks import Check
from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.errors import DataError, ExportError
from upcycle.export.coreai.exporting import SUFFIX
from upcycle.export.coreai.programs import require_coreai
from upcycle.interpreter.arguments import ProgramError
from upcycle.interpreter.interpreter import Interpreter
from upcycle.models.calibration_text import first_ids
from upcycle.models.loading import load_tokenizer
from upcycle.parity.asset import Asset, asset_runner
from upcycle.parity.core_ml import core_ml_runner, has_core_ml
from upcycle.parity.exported import Program, ProgramOutputs, run_program, text_length
from upcycle.parity.logits import compare_logits, shaky_positions
from upcycle.parity.overflow import OverflowProbe
from upcycle.parity.reference import Reference, load_reference, reference_of
from upcycle.parity.results import LIMITS, Arithmetic, ExportCheck, rules
from upcycle.program.signature import DECODE
from upcycle.progress import Progress, Watcher, ignore

_HALF = {"fp32": False, "fp16": True}
_SHOWN = 5  # operations with the largest results


def check_export(
    checkpoint: str | Path,
    product: str | Path,
    *,
    text: Sequence[Path] = (),
    tokens: int = 64,
    max_kl: float | None = None,
    against: str | Path | None = None,
    watch: Watcher = ignore,
) -> ExportCheck:
    """Run an exported program on a text and compare its logits with the checkpoint's.

    The program of a package is run in fp32 and fp16, and on a Mac Core ML runs its decoding
    function too; that of a Core AI asset is run by Apple's CPU runtime.

    Args:
        checkpoint: what the program was made of.
        product: of `upcycle export`: an `.mlpackage`, a folder of chunks, or an `.aimodel`.
        text: files; the packaged held-out text where there are none.
        tokens: of prefill, and as many again of decoding; see `text_length`.
        max_kl: largest mean KL to the whole checkpoint that passes, nats.
        against: another package of the same checkpoint, compared with this one too.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no tokenizer.
        DataError: the text cannot be read, or is too short.
        ExportError: a product is damaged, was not made by `upcycle export`, or holds something
            that the interpreter does not know; or Apple's packages are missing, or their runtime
            refuses the program or ends its process.
    """
    product = Path(product)
    is_asset = product.suffix == SUFFIX
    if is_asset:
        if against is not None:
            raise ExportError(
                "Core AI assets are not compared with each other",
                where="--against",
                fix="check each against its checkpoint",
            )
        require_coreai()
    opened = Checkpoint.open(checkpoint)
    program = Asset.read(product) if is_asset else Program.read(product)
    other = None if against is None else Program.read(Path(against))
    programs = [each for each in (program, other) if each]
    ids = read_tokens(opened.folder, text, text_length(programs, tokens))
    watch(Progress("check-export", 0, 1, "steps", "torch"))
    # The model is freed before the program runs.
    reference = program_reference(load_reference(opened, program), program, ids)
    return compare_program(reference, program, ids, max_kl=max_kl, against=other, watch=watch)


def read_tokens(folder: Path, files: Sequence[Path], number: int) -> Tensor:
    """The first tokens [number] of a text, its documents one after the other.

    Args:
        folder: the checkpoint, for its tokenizer.
        files: text; the packaged held-out text where none is named.
        number: how many.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        DataError: the text cannot be read, or is shorter.
    """
    paths = list(files) or [packaged_text("heldout")]
    found = first_ids(tokenise_files(paths, load_tokenizer(folder)), number)
    if len(found) < number:
        raise DataError(
            f"the text has {len(found)} tokens, and the check needs {number}",
            where=", ".join(map(str, files)),
            fix=f"give more text, or pass --tokens {len(found) // 2} or less",
        )
    return torch.from_numpy(found).long()


def program_reference(model: nn.Module, program: Program | Asset, tokens: Tensor) -> Reference:
    """What a program must give for tokens [N]; its model's numbers are replaced.

    Raises:
        ExportError: a compressed weight of the program is not one of the model's.
    """
    if isinstance(program, Asset):
        return reference_of(model, tokens, program.end, {}, half=not program.is_exact)
    return reference_of(model, tokens, program.end, program.loaded.compressed_weights(DECODE))


def compare_program(
    reference: Reference,
    program: Program | Asset,
    tokens: Tensor,
    *,
    max_kl: float | None = None,
    against: Program | None = None,
    watch: Watcher = ignore,
) -> ExportCheck:
    """`check_export` for a reference on tokens [N].

    Raises:
        ExportError: the interpreter does not know an operation.
    """
    steps = count(1)
    runs = 1
    if isinstance(program, Program):
        runs = len(_HALF) * (2 if against else 1) + has_core_ml()

    def step(note: str) -> None:
        watch(Progress("check-export", next(steps), runs + 1, "steps", note))

    results: list[Arithmetic | Check]
    if isinstance(program, Program):
        results = [*_run_package(reference, program, tokens, against, step)]
    else:
        results = [_run_asset(reference, program, tokens, step)]
    step("")
    found = [each for each in results if isinstance(each, Arithmetic)]
    checks = [each for each in results if isinstance(each, Check)]
    for each in found:
        checks += rules(each, max_kl, compressed=bool(reference.replaced))
    prefilled = max((each.prefill.positions for each in found if each.prefill), default=0)
    return ExportCheck(found, checks, len(tokens), prefilled, reference.replaced)


def _run_package(
    reference: Reference,
    program: Program,
    tokens: Tensor,
    against: Program | None,
    step: Callable[[str], None],
) -> Iterator[Arithmetic | Check]:
    """How a package does in each arithmetic, or the failed check that it runs at all."""
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
            yield Check(f"{name}: the program runs", 1, 0, f"{error.where}: {error.what}")
        else:
            yield compared(name, reference, outputs, other, probe, exact=not half)
    if has_core_ml():
        step("Core ML")
        outputs = run_program(program.only_decode(), core_ml_runner(program.path), tokens)
        yield compared("Core ML", reference, outputs)


def _run_asset(
    reference: Reference, asset: Asset, tokens: Tensor, step: Callable[[str], None]
) -> Arithmetic:
    """How an asset does in Apple's CPU runtime."""
    step("Core AI")
    with asset_runner(asset.path) as runner:
        outputs = run_program(asset, runner, tokens)
    return compared("Core AI", reference, outputs, exact=asset.is_exact)


def compared(
    name: str,
    reference: Reference,
    outputs: ProgramOutputs,
    other: ProgramOutputs | None = None,
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
