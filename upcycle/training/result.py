"""The uptrained checkpoint: the student's own layout, dtype and files, with new weights."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upcycle.checkpoint.lineage import origin_of
from upcycle.checkpoint.manifest import Manifest, read_manifest
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checkpoint.sidecars import copy_sidecars
from upcycle.checkpoint.staging import staged
from upcycle.checkpoint.writer import rewrite
from upcycle.errors import TrainingError
from upcycle.training.facts import RunFacts

LIBRARIES = ("accelerate", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class TrainResult:
    """What a run did.

    Attributes:
        output: the uptrained checkpoint.
        log: the JSONL log.
        steps: optimiser steps in all.
        tokens: tokens trained on, over all processes.
        loss: of the last step, nats per token; None when an earlier process ran it.
        heldout_nll: mean NLL before and after, on rows that were not trained on.
        heldout_kl: KL(source || model) before and after, on the same rows.
        masters_moved: share of the trained weights that differ from the start in fp32.
        stored_moved: the same in the stored dtype.
        tokens_per_second: of this process's steps, evaluation left out; 0 when it ran none.
        notes: what the user should know, such as rows dropped or states passed over.
    """

    output: Path
    log: Path
    steps: int
    tokens: int
    loss: float | None
    heldout_nll: tuple[float, float]
    heldout_kl: tuple[float, float]
    masters_moved: float
    stored_moved: float
    tokens_per_second: float
    notes: tuple[str, ...]


def weights_moved(
    checkpoint: Checkpoint, stored: Mapping[str, nn.Parameter]
) -> tuple[float, float]:
    """Compare trained weights with the checkpoint that they started from.

    Returns:
        The shares of their elements that differ: in fp32, and rounded to the stored dtype.

    Raises:
        TrainingError: a weight does not fit into the stored dtype's range.
    """
    masters = rounded = total = 0
    for name, parameter in stored.items():
        before = checkpoint.read(name)
        after = parameter.detach().cpu()
        kept = after.to(before.dtype)
        if not torch.isfinite(kept).all():
            raise TrainingError(
                f"{name} reaches {float(after.abs().max()):.3g}, which {before.dtype} cannot hold",
                where=str(checkpoint.folder),
                fix="train with a lower learning_rate, or start from a bf16 or fp32 checkpoint",
            )
        masters += int((after != before.to(after.dtype)).sum())
        rounded += int((kept != before).sum())
        total += before.numel()
    return masters / total, rounded / total


def write_result(
    checkpoint: Checkpoint,
    output: Path,
    stored: Mapping[str, nn.Parameter],
    *,
    facts: RunFacts,
    result: Mapping[str, Any],
    overwrite: bool,
) -> None:
    """Write the uptrained folder, whole or not at all.

    Args:
        checkpoint: the student, whose layout and other files are kept byte for byte.
        output: the folder to make.
        stored: new values by the checkpoint's tensor names.
        facts: the run, for the manifest.
        result: numbers about the result, for the manifest.
        overwrite: replace an existing folder.

    Raises:
        OutputError: the folder exists without `overwrite`, or cannot be written.
        CheckpointError: a file of the student cannot be read.
    """
    with staged(output, overwrite=overwrite, inputs=[checkpoint.folder]) as folder:
        hashes = rewrite(checkpoint, folder, stored)
        copy_sidecars(checkpoint, folder)
        shutil.copyfile(checkpoint.folder / CONFIG_FILE, folder / CONFIG_FILE)
        inputs = facts.document.keys() & RunFacts.model_fields.keys()
        Manifest.of(
            stage="train",
            source={
                **{key: facts.document[key] for key in inputs},
                "origin": origin_of(read_manifest(checkpoint.folder)),
            },
            options={key: value for key, value in facts.document.items() if key not in inputs},
            libraries=LIBRARIES,
            result={**result, "weights": hashes},
        ).write(folder)
