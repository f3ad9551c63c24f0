"""The stages of a run, and running those that are not finished.

A stage is finished when its files are there as it left them, made from the same inputs by the same
options; `stages.json` in the output folder records both. An uptraining that was interrupted goes
on from its newest state.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file, hash_folder, write_manifest
from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.checkpoint.staging import locked, staged, writing
from upcycle.conversion.run import convert
from upcycle.data.documents import packaged_text
from upcycle.families import shape_of
from upcycle.pipeline.layout import Layout
from upcycle.pipeline.records import Records
from upcycle.pipeline.request import request_checks
from upcycle.progress import Watcher, ignore
from upcycle.recipe.schema import BUILTIN, ExportRecipe, Recipe
from upcycle.report.build import build_report
from upcycle.report.render import write_report
from upcycle.training.log import LOG_NAME
from upcycle.training.state import check_work, state_folders
from upcycle.utf8 import to_json

_HASHED = ("text", "calibration", "quantize")  # as files: their paths say nothing

COMPARISON_JSON = "comparison.json"
REPORT_JSON = "report.json"


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: "convert", "train", "evaluate", "export" or "report".
        output: the folder that it makes.
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
    inputs: Iterable[Path] = (),
    watch: Watcher = ignore,
    announce: Callable[[str, bool], None] = lambda name, skipped: None,
) -> RunResult:
    """Run the stages of a recipe that are not finished yet.

    Args:
        recipe: what to do.
        command: how to make the report again, for its provenance.
        inputs: files that the output must not touch beside those that the recipe names.
        watch: told the progress of the running stage.
        announce: told each stage's name and whether it is skipped, before it runs.

    Raises:
        OutputError: the output folder overlaps an input, cannot be written, or is being written
            by another run.
        UpcycleError: a stage's own errors; earlier stages stay finished.
    """
    chunked = recipe.export is not None and recipe.export.chunk_size is not None
    layout = Layout(recipe.output, chunked=chunked)
    source = resolve(recipe.source)
    for _, check in request_checks(recipe, source, inputs):
        check()
    with writing(layout.output):
        layout.output.mkdir(parents=True, exist_ok=True)
    with locked(layout.output.resolve(), layout.output):
        skipped = _run_stages(_stages(recipe, source, layout, command), layout, watch, announce)
    report = _read_json(layout.report / REPORT_JSON)
    package = None if recipe.export is None else layout.package
    return RunResult(layout, tuple(skipped), report, package)


def _run_stages(
    stages: list[Stage], layout: Layout, watch: Watcher, announce: Callable[[str, bool], None]
) -> list[str]:
    """Run what is not finished; the names of the stages that were."""
    records = Records(layout.stages)
    check_work(layout.training)
    for stage in stages:
        records.make_room(stage.name, stage.output)
    skipped = []
    for stage in stages:
        fingerprint = _fingerprint(stage)
        done = records.is_finished(stage.name, fingerprint, stage.output)
        announce(stage.name, done)
        if done:
            skipped.append(stage.name)
            continue
        if stage.name == "train" and not records.was_started(stage.name, fingerprint):
            _forget_training(layout)
        records.start(stage.name, fingerprint)
        stage.action(watch)
        records.finish(stage.name, fingerprint, stage.output)
    return skipped


def _stages(recipe: Recipe, source: Path, layout: Layout, command: str) -> list[Stage]:
    """The recipe's stages in order; each reads what the ones before it made."""
    stages = []
    last = layout.converted if recipe.train is None else layout.uptrained
    candidates = [layout.converted] if recipe.train is None else [layout.converted, last]
    log = None if recipe.train is None else layout.training / LOG_NAME
    source_hash = _content(source)

    def models() -> dict[str, Any]:
        return {"source": source_hash, "candidates": [_made(folder) for folder in candidates]}

    def convert_stage(watch: Watcher) -> None:
        section = recipe.convert.model_dump()
        convert(source, layout.converted, overwrite=True, watch=watch, **section)

    stages.append(
        Stage(
            "convert",
            layout.converted,
            _without_paths(recipe.convert.model_dump(mode="json")),
            lambda: {"source": source_hash, "text": _texts(recipe.convert.calibration)},
            convert_stage,
        )
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

        stages.append(
            Stage(
                "train",
                layout.uptrained,
                _without_paths(training.model_dump(mode="json")),
                lambda: {
                    "converted": _made(layout.converted),
                    "source": source_hash,
                    "text": [_content(item.path) for item in training.data.sources],
                },
                train_stage,
            )
        )
    evaluate_options = _without_paths(recipe.evaluate.model_dump(mode="json"))

    def evaluate_inputs() -> dict[str, Any]:
        return {**models(), "text": [_content(path) for path in recipe.evaluate.text]}

    def evaluate_stage(watch: Watcher) -> None:
        from upcycle.evaluation.compare import evaluate

        section = recipe.evaluate.model_dump()
        section["margins"] = recipe.evaluate.margins.model_dump()
        comparison = evaluate(source, candidates, watch=watch, **section).to_dict()
        with staged(layout.evaluation, overwrite=True) as folder:
            text = to_json(comparison, indent=2) + "\n"
            (folder / COMPARISON_JSON).write_text(text, encoding="utf-8")
            write_manifest(
                folder,
                stage="evaluate",
                source=evaluate_inputs(),
                options=evaluate_options,
                libraries=("torch", "transformers"),
                result={"files": hash_folder(folder)},
            )

    stages.append(
        Stage("evaluate", layout.evaluation, evaluate_options, evaluate_inputs, evaluate_stage)
    )
    if recipe.export is not None:
        exported = recipe.export

        def export_stage(watch: Watcher) -> None:
            from upcycle.export.coreml import export_coreml
            from upcycle.export.options import ExportOptions

            export_coreml(
                last,
                layout.package,
                ExportOptions(**exported.model_dump(exclude={"calibration"})),
                calibration=exported.calibration,
                overwrite=True,
                watch=watch,
            )

        stages.append(
            Stage(
                "export",
                layout.package,
                _without_paths(exported.model_dump(mode="json")),
                lambda: {"checkpoint": _made(last), **_quantization(exported)},
                export_stage,
            )
        )

    def report_stage(watch: Watcher) -> None:
        comparison = _read_json(layout.evaluation / COMPARISON_JSON)
        labels = [model["label"] for model in comparison["models"]]
        export = None
        if recipe.export is not None:
            from upcycle.export.traffic import describe_export

            export = describe_export(shape_of(Checkpoint.open(source).config), layout.package)
        document = build_report(
            comparison,
            folders=dict(zip(labels, [source, *candidates], strict=True)),
            command=command,
            training_log=log,
            export=export,
        )
        with staged(layout.report, overwrite=True) as folder:
            write_report(document, folder)

    stages.append(
        Stage(
            "report",
            layout.report,
            {"command": command},
            lambda: {
                **models(),
                "comparison": _made(layout.evaluation),
                "log": None if log is None else _content(log),
                "package": None if recipe.export is None else _content(layout.package),
            },
            report_stage,
        )
    )
    return stages


def _forget_training(layout: Layout) -> None:
    """Remove the states of another run."""
    for folder in state_folders(layout.training):
        shutil.rmtree(folder)


def _fingerprint(stage: Stage) -> str:
    from upcycle import __version__

    facts = {"options": stage.options, "inputs": stage.inputs(), "upcycle": __version__}
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _content(path: Path) -> str | dict[str, str]:
    """Hashes of a file, or of every file of a folder."""
    return hash_folder(path) if path.is_dir() else hash_file(path)


def _texts(calibration: Iterable[Path]) -> list[str | dict[str, str]]:
    """Hashes of text that is measured on."""
    return [
        _content(packaged_text("calibration") if str(path) == BUILTIN else path)
        for path in calibration
    ]


def _quantization(exported: ExportRecipe) -> dict[str, Any]:
    """Hashes of what decides how weights are stored."""
    if exported.quantize is None:
        return {}
    scheme = Path(exported.quantize)
    return {
        "text": _texts(exported.calibration),
        "scheme": hash_file(scheme) if scheme.is_file() else exported.quantize,
    }


def _made(folder: Path) -> str:
    """The hash of a made folder's manifest, which holds the hashes of its files."""
    return hash_file(folder / MANIFEST_NAME)


def _without_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Options without the paths of text, whose content is hashed instead."""
    kept = {key: value for key, value in options.items() if key not in _HASHED}
    if "data" in kept:
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "sources"}
    return kept


def _read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
