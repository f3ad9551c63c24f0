"""report.json: one document that report.md and report.html are rendered from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from upcycle.checkpoint.manifest import Manifest
from upcycle.errors import EvaluationError
from upcycle.evaluation.results import Comparison
from upcycle.program.bandwidth import ExportFigures
from upcycle.utf8 import strict

SCHEMA = 1
_Document = TypeVar("_Document")


@dataclass(frozen=True)
class ModelProvenance:
    """Where one compared model comes from.

    Attributes:
        label: the model's label in `comparison.models`.
        folder: the folder's name, without what is above it.
        files: content hash of every file that loading reads, by name.
        manifest: the folder's upcycle.json: stage, source hashes, options, versions; None for a
            stranger's.
    """

    label: str
    folder: str
    files: dict[str, str]
    manifest: Manifest | None


@dataclass(frozen=True)
class TrainingPoint:
    """One optimiser step of the training log.

    Attributes:
        step: optimiser step, from 1.
        loss: the training loss of this step, nats per token; None where it was not finite.
    """

    step: int
    loss: float | None


@dataclass(frozen=True)
class HeldOutPoint:
    """One evaluation during training, on held-out text; None where a number was not finite.

    Attributes:
        step: optimiser steps done before it.
        kl: KL(source || model), nats per token.
        nll: negative log-likelihood, nats per token.
    """

    step: int
    kl: float | None
    nll: float | None


@dataclass(frozen=True)
class Training:
    """The training run, thinned out to at most `MOST_POINTS` steps.

    Attributes:
        steps: the last step of the log.
        tokens: tokens trained on; None where the log does not say.
        points: the training loss, evenly thinned out.
        held_out: every evaluation of the log.
    """

    steps: int
    tokens: int | None
    points: list[TrainingPoint]
    held_out: list[HeldOutPoint]


@dataclass(frozen=True)
class ReportDocument:
    """Everything in report.json.

    Attributes:
        schema: version of this layout; a key that changes its meaning raises it.
        command: the command that makes this report again.
        versions: of upcycle, python and the libraries that shape the numbers.
        comparison: what was measured.
        provenance: one entry for each of `comparison.models`, in the same order.
        warnings: what speaks against the comparison, such as a candidate of another source.
        training: the uptraining run; None where no log was given.
        export: the Core ML package; None before an export.
    """

    schema: int
    command: str
    versions: dict[str, str]
    comparison: Comparison
    provenance: list[ModelProvenance]
    warnings: list[str]
    training: Training | None
    export: ExportFigures | None

    def to_dict(self) -> dict[str, Any]:
        """The content of report.json."""
        document: dict[str, Any] = strict(TypeAdapter(ReportDocument).dump_python(self))
        return document


def read_document(kind: type[_Document], path: Path) -> _Document:
    """A comparison or a report from the JSON file that a run wrote.

    Raises:
        EvaluationError: the file has another layout.
    """
    try:
        return TypeAdapter(kind).validate_python(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise EvaluationError(
            f"{path.name} is not what this version of upcycle writes: see {key}",
            where=str(path),
            fix=f"remove {path.parent} and run the recipe again",
        ) from error
