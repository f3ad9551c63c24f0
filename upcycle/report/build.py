"""Gather everything that a report shows into one JSON document."""

from collections.abc import Mapping
from pathlib import Path

from upcycle.checkpoint.lineage import not_of_origin, origin_of
from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file, read_manifest, versions
from upcycle.evaluation.results import Comparison
from upcycle.program.bandwidth import ExportFigures
from upcycle.report.schema import (
    SCHEMA,
    HeldOutPoint,
    ModelProvenance,
    ReportDocument,
    Training,
    TrainingPoint,
)
from upcycle.training.log import LogRecord, drawable, read_log

MOST_POINTS = 400
# What loading reads. Other files, such as a second copy in another format, may be huge.
LOADED_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
LIBRARIES = ("safetensors", "scipy", "tokenizers", "torch", "transformers")


def build_report(
    comparison: Comparison,
    *,
    folders: Mapping[str, Path],
    command: str,
    training_log: Path | None = None,
    export: ExportFigures | None = None,
) -> ReportDocument:
    """The content of report.json. It holds no times, host names or absolute paths.

    Args:
        comparison: what was measured.
        folders: the checkpoint folder of each model, by its label in the comparison.
        command: the command that makes the report again.
        training_log: `training/log.jsonl` of the uptraining run.
        export: what was counted in the Core ML package.
    """
    provenance = [_provenance(model.label, folders[model.label]) for model in comparison.models]
    training = read_training_log(training_log) if training_log else None
    warnings = _other_sources(provenance)
    if training_log and training is None:
        warnings.append(
            f"{training_log.name} of the uptraining tells of no step that can be read, so that "
            "nothing is said of it here"
        )
    return ReportDocument(
        schema=SCHEMA,
        command=command,
        versions=versions(LIBRARIES),
        comparison=comparison,
        provenance=provenance,
        warnings=warnings,
        training=training,
        export=export,
    )


def read_training_log(path: Path) -> Training | None:
    """The loss curve of a training log, thinned out; None for a log without steps.

    Steps ascend; of one that is told twice, as in logs that were joined, the last counts.
    """
    rows = read_log(path)
    steps = _by_step(rows, "loss")
    if not steps:
        return None
    tokens = drawable(steps[-1].tokens)
    return Training(
        steps=steps[-1].step,
        tokens=None if tokens is None else int(tokens),
        points=[TrainingPoint(row.step, drawable(row.loss)) for row in _thinned(steps)],
        held_out=[
            HeldOutPoint(row.step, drawable(row.heldout_kl), drawable(row.heldout_nll))
            for row in _by_step(rows, "heldout_kl")
        ],
    )


def _by_step(rows: list[LogRecord], key: str) -> list[LogRecord]:
    found = {row.step: row for row in rows if key in row.model_fields_set}
    return [found[step] for step in sorted(found)]


def _thinned(rows: list[LogRecord]) -> list[LogRecord]:
    """At most `MOST_POINTS` of the rows, evenly spread, the first and the last among them."""
    if len(rows) <= MOST_POINTS:
        return rows
    last = len(rows) - 1
    return [rows[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def _other_sources(provenance: list[ModelProvenance]) -> list[str]:
    """A line for each candidate whose manifest tells of another source than the compared one."""
    source, *candidates = provenance
    warnings = []
    for model in candidates:
        origin = origin_of(model.manifest)
        other = not_of_origin(origin, source.files) if origin else []
        if other:
            warnings.append(
                f"{model.label} ({model.folder}) was not made from {source.folder}: "
                f"{', '.join(other)} there is another than its upcycle.json tells"
            )
    return warnings


def _provenance(label: str, folder: Path) -> ModelProvenance:
    return ModelProvenance(
        label=label,
        folder=folder.resolve().name,
        files={
            path.name: hash_file(path)
            for path in sorted(folder.iterdir())
            if path.suffix in LOADED_SUFFIXES and path.is_file() and path.name != MANIFEST_NAME
        },
        manifest=read_manifest(folder),
    )
