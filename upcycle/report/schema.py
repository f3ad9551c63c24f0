"""report.json: one document that report.md and report.html are rendered from.

The likelihood part, `comparison`, is `upcycle.evaluation.results.Comparison.to_dict()`: each of its
keys is documented at the dataclass attribute of the same name.
"""

from typing import Any, TypedDict

SCHEMA = 1


class ModelProvenance(TypedDict):
    """Where one compared model comes from."""

    label: str
    """The model's label in `comparison.models`."""
    folder: str
    """The folder's name, without what is above it."""
    files: dict[str, str]
    """Content hash of every file that loading reads, by name."""
    manifest: dict[str, Any] | None
    """The folder's upcycle.json: stage, source hashes, options, versions; None for a stranger's."""


class TrainingPoint(TypedDict):
    """One optimiser step of the training log."""

    step: int
    """Optimiser step, from 1."""
    loss: float | None
    """The training loss of this step, nats per token; None where it was not finite."""


class HeldOutPoint(TypedDict):
    """One evaluation during training."""

    step: int
    """Optimiser steps done before it."""
    kl: float | None
    """KL(source || model) on held-out text, nats per token; None where it was not finite."""
    nll: float | None
    """Negative log-likelihood on held-out text, nats per token; None where it was not finite."""


class Training(TypedDict):
    """The training run, thinned out to at most `MOST_POINTS` steps."""

    steps: int
    """The last step of the log."""
    tokens: int | None
    """Tokens trained on; None where the log does not say."""
    points: list[TrainingPoint]
    """The training loss, evenly thinned out."""
    held_out: list[HeldOutPoint]
    """Every evaluation of the log."""


class ReportDocument(TypedDict):
    """Everything in report.json."""

    schema: int
    """Version of this layout; a key that changes its meaning raises it."""
    command: str
    """The command that makes this report again."""
    versions: dict[str, str]
    """Versions of upcycle, python and the libraries that shape the numbers."""
    comparison: dict[str, Any]
    """`upcycle.evaluation.results.Comparison.to_dict()`."""
    provenance: list[ModelProvenance]
    """One entry for each of `comparison.models`, in the same order."""
    warnings: list[str]
    """What speaks against the comparison, such as a candidate of another source."""
    training: Training | None
    """The uptraining run; None where no log was given."""
    export: dict[str, Any] | None
    """`upcycle.program.bandwidth.describe_export()`; None before an export."""
