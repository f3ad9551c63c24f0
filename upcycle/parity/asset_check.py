"""Compare a Core AI asset with the checkpoint that it was made of, on Apple's CPU runtime."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.coreai.programs import require_coreai
from upcycle.parity.asset import Asset
from upcycle.parity.asset_execution import AssetRunner
from upcycle.parity.check import compared
from upcycle.parity.program import run_program, text_length
from upcycle.parity.reference import load_reference, reference_of
from upcycle.parity.results import ExportCheck
from upcycle.parity.rules import rules
from upcycle.parity.text import read_tokens
from upcycle.progress import Progress, Watcher, ignore

_STEPS = 2
RUNTIME = "Core AI"


def check_asset(
    checkpoint: str | Path,
    asset: str | Path,
    *,
    text: Sequence[Path] = (),
    tokens: int = 64,
    max_kl: float | None = None,
    watch: Watcher = ignore,
) -> ExportCheck:
    """Run an asset on a text and compare its logits with the checkpoint's.

    Args:
        checkpoint: what the asset was made of.
        asset: an `.aimodel` of `upcycle export`.
        text: files; the packaged held-out text where there are none.
        tokens: of prefill, and as many again of decoding; see `text_length`.
        max_kl: largest mean KL to the checkpoint that passes, nats.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no tokenizer.
        DataError: the text cannot be read, or is too short.
        ExportError: the asset was not made by `upcycle export`, Apple's packages are missing, or
            the runtime refuses the program or ends its process.
    """
    require_coreai()
    opened = Checkpoint.open(checkpoint)
    read = Asset.read(Path(asset))
    ids = read_tokens(opened.folder, text, text_length([read], tokens))
    steps = count()

    def step(note: str) -> None:
        watch(Progress("check-export", next(steps), _STEPS, "steps", note))

    step("torch")
    exact = read.manifest.options.dtype == "float32"
    # The model is gone when the program runs.
    reference = reference_of(
        load_reference(opened, read),
        ids,
        read.end,
        {},
        half=not exact,
    )
    step(RUNTIME)
    with AssetRunner(read.path) as runner:
        outputs = run_program(read, runner, ids)
    step("")
    found = compared(RUNTIME, reference, outputs, exact=exact)
    return ExportCheck([found], list(rules(found, max_kl)), len(ids), outputs.prefilled, 0)
