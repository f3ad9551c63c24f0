"""Compare a Core AI asset with the checkpoint that it was made of, on Apple's CPU runtime."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from upcycle.checkpoint.loading import load_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.coreai.execution import AssetRunner
from upcycle.export.coreai.programs import require_coreai
from upcycle.export.coreai.reading import Asset
from upcycle.export.parity.logits import compare_logits
from upcycle.export.parity.program import END, Program, run_program
from upcycle.export.parity.results import Arithmetic, ExportCheck
from upcycle.export.parity.rules import rules
from upcycle.export.parity.text import read_tokens
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
        tokens: of prefill, and as many again of decoding; fewer where the context is shorter.
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
    ids = read_tokens(opened.folder, text, min(2 * tokens, read.context))
    steps = count()

    def step(note: str) -> None:
        watch(Progress("check-export", next(steps), _STEPS, "steps", note))

    step("torch")
    model = load_model(opened.folder, dtype=torch.float32, attention="eager")
    expected = _logits(model, ids, 0), _logits(model, ids[:END], read.end)
    del model
    step(RUNTIME)
    with AssetRunner(read.path) as runner:
        outputs = run_program(cast("Program", read), runner, ids)
    step("")
    difference = compare_logits(expected[0], outputs.text)
    caches, decoded = outputs.caches, outputs.decoded
    found = Arithmetic(
        name=RUNTIME,
        text=difference,
        end=compare_logits(expected[1], outputs.end),
        prefill=None if decoded is None else compare_logits(decoded, outputs.text[: len(decoded)]),
        caches=None if caches is None else float(caches.max()),
        typical_caches=None if caches is None else float(caches.median()),
        full=difference,
        against=None,
        largest=[],
        overflowed=[],
    )
    return ExportCheck([found], list(rules(found, max_kl)), len(ids), outputs.prefilled, 0)


@torch.inference_mode()
def _logits(model: nn.Module, tokens: Tensor, start: int) -> Tensor:
    """Logits [N, vocabulary] of tokens [N] at the positions from `start` on."""
    positions = torch.arange(start, start + len(tokens))[None]
    output: Any = model(input_ids=tokens[None], position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits.float()
