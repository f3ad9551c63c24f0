"""The stages of a recipe: what each reads, makes, and finds already made."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from upcycle.checkpoint.lineage import differences
from upcycle.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_file,
    hash_folder,
    write_manifest,
)
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checkpoint.staging import staged
from upcycle.conversion.convert import convert
from upcycle.errors import warn
from upcycle.evaluation.results import Comparison
from upcycle.export import options as export_options
from upcycle.export.quantize.loading import load_quantization
from upcycle.families import shape_of
from upcycle.models.calibration_text import path_of
from upcycle.options.export import ExportRecipe
from upcycle.pipeline import training
from upcycle.pipeline.contents import Contents
from upcycle.pipeline.conversion import option_changes
from upcycle.pipeline.layout import Layout
from upcycle.pipeline.outputs import Stage, file_damage, manifest_changes
from upcycle.program.hashes import bundle_folder
from upcycle.progress import Watcher
from upcycle.recipe.schema import Recipe
from upcycle.report.build import LOADED_SUFFIXES, build_report
from upcycle.report.render import write_report
from upcycle.report.schema import read_document
from upcycle.training.facts import weight_hashes
from upcycle.training.log import LOG_NAME
from upcycle.training.team import team
from upcycle.utf8 import to_json

COMPARISON_JSON = "comparison.json"
REPORT_JSON = "report.json"
LIBRARIES = ("torch", "transformers")
Note = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """What the stages of a run share.

    Attributes:
        recipe: what to do.
        source: the folder of the recipe's source.
        layout: where everything goes.
        command: how to make the report again, for its provenance.
        contents: the hashes of what is read and made.
    """

    recipe: Recipe
    source: Path
    layout: Layout
    command: str
    contents: Contents

    @property
    def last(self) -> Path:
        """The checkpoint that is judged and exported."""
        return self.layout.converted if self.recipe.train is None else self.layout.uptrained

    @property
    def candidates(self) -> list[Path]:
        """The checkpoints that are compared with the source."""
        return list(dict.fromkeys([self.layout.converted, self.last]))

    @property
    def log(self) -> Path | None:
        """The log of the uptraining, where there is one."""
        log = self.layout.training / LOG_NAME
        return log if self.recipe.train is not None and log.is_file() else None

    def models(self) -> dict[str, Any]:
        """Hashes that stand for the compared checkpoints."""
        made = [hash_file(folder / MANIFEST_NAME) for folder in self.candidates]
        return {"source": self.source_files(), "candidates": made}

    def source_files(self) -> dict[str, str]:
        """Hashes of what loading the source reads."""
        return _loaded(self.contents.of_folder(self.source))

    def weights(self, folder: Path) -> dict[str, str]:
        """Hashes of a checkpoint's configuration and weights."""
        found = self.contents.of_folder(folder)
        headers = Checkpoint.open(folder).headers
        return {name: found[name] for name in (CONFIG_FILE, *(h.path.name for h in headers))}


def stages_of(run: Run) -> list[Stage]:
    """The recipe's stages in order; each reads what the ones before it made."""
    made = [_convert_stage(run)]
    if run.recipe.train is not None:
        made.append(_train_stage(run))
    models = tuple(stage.name for stage in made)
    made.append(_evaluate_stage(run, models))
    if run.recipe.export is not None:
        made.append(_export_stage(run, run.recipe.export, models))
    made.append(_report_stage(run, tuple(stage.name for stage in made)))
    return made


def _convert_stage(run: Run) -> Stage:
    section, folder = run.recipe.convert, run.layout.converted

    def changes(manifest: Manifest) -> list[str]:
        was = _loaded(manifest.source.files)
        return [
            *differences({"source": was}, {"source": run.source_files()}),
            *option_changes(manifest, section),
        ]

    def action(watch: Watcher, _: Note) -> None:
        made = convert(run.source, folder, overwrite=True, watch=watch, **section.model_dump())
        for warning in made.plan.warnings:
            warn(warning)

    return Stage(
        "convert",
        folder,
        folder / MANIFEST_NAME,
        (),
        changes,
        lambda manifest: file_damage(manifest.result.files, run.contents.of_folder(folder)),
        action,
    )


def _train_stage(run: Run) -> Stage:
    folder = run.layout.uptrained

    def action(watch: Watcher, note: Note) -> None:
        crew = team()
        if crew is not None:
            crew.tell(training.JOIN)
        command = ["upcycle", "train", *shlex.split(run.command)[2:]]
        result = training.start(
            run.recipe, resume=True, overwrite=True, watch=watch, tell=note, command=command
        )
        for text in result.notes:
            note(text)

    return Stage(
        "train",
        folder,
        folder / MANIFEST_NAME,
        ("convert",),
        lambda manifest: training_changes(run, training.result_facts(manifest), is_made=True),
        lambda manifest: file_damage(
            manifest.result.weights, run.contents.of_folder(folder), name="weights"
        ),
        action,
    )


def training_changes(run: Run, facts: Mapping[str, Any], *, is_made: bool) -> list[str]:
    """What makes the recipe's uptraining another run than that of a state or a result.

    Args:
        run: with a train section.
        facts: of the run that was.
        is_made: whether the converted folder is the recipe's.
    """
    assert run.recipe.train is not None
    student = None
    if is_made:
        student = run.weights(run.layout.converted)
    named = run.recipe.train.teacher
    if named is None:
        teacher = run.weights(run.source)
    else:
        teacher = weight_hashes(Checkpoint.open(training.teacher_of(run.recipe)))
    return training.run_changes(
        facts,
        run.recipe.train,
        converted=run.layout.converted,
        student=student,
        teacher=teacher,
    )


def _evaluate_stage(run: Run, needs: tuple[str, ...]) -> Stage:
    section, folder = run.recipe.evaluate, run.layout.evaluation
    options = section.model_dump(mode="json", exclude={"text"})

    def source() -> dict[str, Any]:
        return {**run.models(), "text": [run.contents.of(path) for path in section.text]}

    def action(watch: Watcher, _: Note) -> None:
        from upcycle.evaluation.compare import evaluate

        asked = {**section.model_dump(), "margins": section.margins.model_dump()}
        comparison = evaluate(run.source, run.candidates, watch=watch, **asked)
        with staged(folder, overwrite=True) as partial:
            text = to_json(comparison.to_dict(), indent=2) + "\n"
            (partial / COMPARISON_JSON).write_text(text, encoding="utf-8")
            _write_manifest(partial, "evaluate", source(), options)

    return Stage(
        "evaluate",
        folder,
        folder / MANIFEST_NAME,
        needs,
        lambda manifest: manifest_changes(manifest, source=source(), options=options),
        lambda manifest: file_damage(manifest.result.files, run.contents.of_folder(folder)),
        action,
    )


def _export_stage(run: Run, section: ExportRecipe, needs: tuple[str, ...]) -> Stage:
    package, is_chunked = run.layout.package, section.chunk_size is not None
    folder = package if is_chunked else bundle_folder(package)
    options = export_options.ExportOptions(**section.model_dump(exclude={"calibration"}))
    scheme = None if section.quantize is None else Path(section.quantize).name

    def action(watch: Watcher, note: Note) -> None:
        from upcycle.export.coreml import export_coreml
        from upcycle.export.risks import device_notes

        made = export_coreml(
            run.last,
            package,
            options,
            calibration=section.calibration,
            overwrite=True,
            watch=watch,
        )
        for text in device_notes(made, core_ai=False):
            note(f"note: {text}")

    def damaged(manifest: Manifest) -> list[str]:
        wrong = file_damage(manifest.result.files, run.contents.of_folder(folder))
        if is_chunked:
            return wrong
        made = run.contents.of_folder(package)
        return wrong + file_damage(manifest.result.package, made, name="package")

    return Stage(
        "export",
        package,
        folder / MANIFEST_NAME,
        needs,
        lambda manifest: manifest_changes(
            manifest,
            source=run.weights(run.last),
            options={**asdict(options), "quantize": scheme},
        ),
        damaged,
        action,
        lambda: _quantization(run, section),
    )


def _quantization(run: Run, section: ExportRecipe) -> str | None:
    """A hash of what decides how weights are stored, but for a preset's own name."""
    if section.quantize is None:
        return None
    is_file = Path(section.quantize).is_file()
    texts = []
    if load_quantization(section.quantize).promote is not None:
        texts = [run.contents.of(path_of(text)) for text in section.calibration]
    elif not is_file:
        return None
    read = [hash_file(Path(section.quantize)) if is_file else section.quantize, texts]
    return xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode())


def _report_stage(run: Run, needs: tuple[str, ...]) -> Stage:
    layout, recipe = run.layout, run.recipe
    options = {"command": run.command}

    def source() -> dict[str, Any]:
        return {
            **run.models(),
            "comparison": hash_file(layout.evaluation / MANIFEST_NAME),
            "log": None if run.log is None else hash_file(run.log),
            "package": None if recipe.export is None else run.contents.of(layout.package),
        }

    def action(watch: Watcher, _: Note) -> None:
        comparison = read_document(Comparison, layout.evaluation / COMPARISON_JSON)
        labels = [model.label for model in comparison.models]
        export = None
        if recipe.export is not None:
            from upcycle.program.bandwidth import describe_export

            export = describe_export(shape_of(Checkpoint.open(run.source).config), layout.package)
        document = build_report(
            comparison,
            folders=dict(zip(labels, [run.source, *run.candidates], strict=True)),
            command=run.command,
            training_log=run.log,
            export=export,
        )
        with staged(layout.report, overwrite=True) as folder:
            write_report(document, folder)
            _write_manifest(folder, "report", source(), options)

    return Stage(
        "report",
        layout.report,
        layout.report / MANIFEST_NAME,
        needs,
        lambda manifest: manifest_changes(manifest, source=source(), options=options),
        lambda manifest: file_damage(manifest.result.files, run.contents.of_folder(layout.report)),
        action,
    )


def _write_manifest(
    folder: Path, stage: str, source: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    write_manifest(
        folder,
        stage=stage,
        source=source,
        options=options,
        libraries=LIBRARIES,
        result={"files": hash_folder(folder)},
    )


def _loaded(files: Mapping[str, str]) -> dict[str, str]:
    """Those of a folder's hashes that are of what loading reads, and not of cards and pictures."""
    return {name: known for name, known in files.items() if Path(name).suffix in LOADED_SUFFIXES}
