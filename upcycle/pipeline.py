"""`upcycle run`: convert, uptrain, evaluate and export by one recipe, each stage once.

A stage is finished when its output exists and was made from the same inputs by the same options;
`stages.json` in the output folder holds the fingerprint of both. An uptraining that was
interrupted goes on from its newest state.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file, hash_folder
from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.checkpoint.staging import staged
from upcycle.conversion.run import convert
from upcycle.families import shape_of
from upcycle.progress import Watcher, ignore
from upcycle.recipe.schema import Recipe
from upcycle.report.build import build_report
from upcycle.report.render import write_report

REPORT_JSON = "report.json"


@dataclass(frozen=True)
class Layout:
    """Where a run keeps what it makes."""

    output: Path

    @property
    def converted(self) -> Path:
        """The converted checkpoint (0 training)."""
        return self.output / "converted"

    @property
    def uptrained(self) -> Path:
        """The uptrained checkpoint."""
        return self.output / "uptrained"

    @property
    def training(self) -> Path:
        """Training states and log."""
        return self.output / "training"

    @property
    def report(self) -> Path:
        """report.json, report.md and report.html."""
        return self.output / "report"

    @property
    def package(self) -> Path:
        """The Core ML package."""
        return self.output / "model.mlpackage"

    @property
    def stages(self) -> Path:
        """The record of the finished stages."""
        return self.output / "stages.json"


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: "convert", "train", "evaluate" or "export".
        output: what it makes.
        options: the recipe's section, as plain data.
        inputs: hashes of everything that it reads, known when the stages before it are finished.
        action: makes the output anew.
    """

    name: str
    output: Path
    options: Mapping[str, Any]
    inputs: Callable[[], Mapping[str, Any]]
    action: Callable[[Watcher], object]


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Attributes:
        layout: where everything is.
        skipped: the stages that were finished before.
        report: the content of report.json.
        package: the Core ML package, or None where the recipe exports none.
    """

    layout: Layout
    skipped: tuple[str, ...]
    report: Mapping[str, Any]
    package: Path | None

    @property
    def passed(self) -> bool:
        """Whether every margin of the recipe was kept."""
        return all(margin["passed"] for margin in self.report["comparison"]["margins"])


def run(
    recipe: Recipe,
    *,
    command: str,
    watch: Watcher = ignore,
    announce: Callable[[str, bool], None] = lambda name, skipped: None,
) -> RunResult:
    """Run the stages of a recipe that are not finished yet.

    Args:
        recipe: what to do.
        command: how to make the report again, for its provenance.
        watch: told the progress of the running stage.
        announce: told each stage's name and whether it is skipped, before it runs.

    Raises:
        UpcycleError: a stage's own errors; earlier stages stay finished.
    """
    layout = Layout(recipe.output)
    source = resolve(recipe.source)
    layout.output.mkdir(parents=True, exist_ok=True)
    skipped = []
    for stage in _stages(recipe, source, layout, command):
        fingerprint = _fingerprint(stage)
        record = _read_record(layout)
        done = record.get(stage.name) == fingerprint and stage.output.exists()
        announce(stage.name, done)
        if done:
            skipped.append(stage.name)
            continue
        started = f"{stage.name} (started)"
        if stage.name == "train" and record.get(started) != fingerprint:
            shutil.rmtree(layout.training, ignore_errors=True)
        _write_record(layout, {**record, started: fingerprint})
        stage.action(watch)
        kept = {name: value for name, value in record.items() if name != started}
        _write_record(layout, {**kept, stage.name: fingerprint})
    if recipe.export is not None:
        _add_export_section(source, layout, again="export" not in skipped)
    report = json.loads((layout.report / REPORT_JSON).read_text(encoding="utf-8"))
    package = None if recipe.export is None else layout.package
    return RunResult(layout, tuple(skipped), report, package)


def _stages(recipe: Recipe, source: Path, layout: Layout, command: str) -> Iterable[Stage]:
    """The recipe's stages in order; each reads what the ones before it made."""
    last = layout.converted if recipe.train is None else layout.uptrained
    candidates = [layout.converted] if recipe.train is None else [layout.converted, last]

    def convert_stage(watch: Watcher) -> None:
        section = recipe.convert.model_dump()
        convert(source, layout.converted, overwrite=True, watch=watch, **section)

    yield Stage(
        "convert",
        layout.converted,
        recipe.convert.model_dump(mode="json"),
        lambda: {"source": _content(source)},
        convert_stage,
    )
    if recipe.train is not None:
        training = recipe.train

        def train_stage(watch: Watcher) -> None:
            from upcycle.training.loop import uptrain

            uptrain(
                layout.converted,
                source,
                training,
                layout.uptrained,
                layout.training,
                resume=True,
                overwrite=True,
                watch=watch,
            )

        yield Stage(
            "train",
            layout.uptrained,
            _without_paths(training.model_dump(mode="json")),
            lambda: {
                "converted": _made(layout.converted),
                "source": _content(source),
                "text": [_content(item.path) for item in training.data.sources],
            },
            train_stage,
        )

    def evaluate_stage(watch: Watcher) -> None:
        from upcycle.evaluation.compare import evaluate

        section = recipe.evaluate.model_dump()
        section["margins"] = recipe.evaluate.margins.model_dump()
        comparison = evaluate(source, candidates, watch=watch, **section).to_dict()
        document = build_report(
            comparison,
            folders=dict(zip(_labels(comparison), [source, *candidates], strict=True)),
            command=command,
            training_log=None if recipe.train is None else layout.training / "log.jsonl",
        )
        with staged(layout.report, overwrite=True) as folder:
            write_report(document, folder)

    yield Stage(
        "evaluate",
        layout.report,
        _without_paths(recipe.evaluate.model_dump(mode="json")),
        lambda: {
            "source": _content(source),
            "candidates": [_made(folder) for folder in candidates],
            "text": [_content(path) for path in recipe.evaluate.text],
        },
        evaluate_stage,
    )
    if recipe.export is not None:
        exported = recipe.export

        def export_stage(watch: Watcher) -> None:
            from upcycle.export.coreml import export_coreml

            export_coreml(
                last, layout.package, overwrite=True, watch=watch, **exported.model_dump()
            )

        yield Stage(
            "export",
            layout.package,
            exported.model_dump(mode="json"),
            lambda: {"checkpoint": _made(last)},
            export_stage,
        )


def _add_export_section(source: Path, layout: Layout, *, again: bool) -> None:
    """Put what the package's graph moves into the report, and render it anew."""
    path = layout.report / REPORT_JSON
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["export"] is not None and not again:
        return
    from upcycle.export.traffic import describe_export

    shape = shape_of(Checkpoint.open(source).config)
    document["export"] = describe_export(shape, layout.package)
    with staged(layout.report, overwrite=True) as folder:
        write_report(document, folder)


def _labels(comparison: Mapping[str, Any]) -> list[str]:
    return [model["label"] for model in comparison["models"]]


def _fingerprint(stage: Stage) -> str:
    from upcycle import __version__

    facts = {"options": stage.options, "inputs": stage.inputs(), "upcycle": __version__}
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _content(path: Path) -> str | dict[str, str]:
    """Hashes of a file, or of every file of a folder."""
    return hash_folder(path) if path.is_dir() else hash_file(path)


def _made(folder: Path) -> str:
    """The hash of a made folder's manifest, which holds the hashes of its files."""
    return hash_file(folder / MANIFEST_NAME)


def _without_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Options without the paths of text, whose content is hashed instead."""
    kept = {key: value for key, value in options.items() if key != "text"}
    if "data" in kept:
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "sources"}
    return kept


def _read_record(layout: Layout) -> dict[str, str]:
    if not layout.stages.is_file():
        return {}
    record: dict[str, str] = json.loads(layout.stages.read_text(encoding="utf-8"))
    return record


def _write_record(layout: Layout, record: Mapping[str, str]) -> None:
    temporary = layout.stages.with_suffix(".partial")
    temporary.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(layout.stages)
