"""What version 0.1.0 wrote is read: `fixtures-0.1` is a run's output folder without its weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upcycle.checkpoint.lineage import origin_of
from upcycle.checkpoint.manifest import MANIFEST_NAME, made_here, read_manifest
from upcycle.conversion.measured import measured_layers
from upcycle.errors import EvaluationError, TrainingError
from upcycle.evaluation.results import Comparison
from upcycle.pipeline.records import Records
from upcycle.program.noted import folder_manifest
from upcycle.report.build import read_training_log
from upcycle.report.render import render_html, write_report
from upcycle.report.schema import ReportDocument, read_document
from upcycle.training.state import find_state, newest_facts

RUN = Path(__file__).parent / "fixtures-0.1"
COMPARISON = RUN / "evaluation" / "comparison.json"
WEIGHTS = "model.safetensors"
MANIFESTS = sorted(path.parent for path in RUN.rglob(MANIFEST_NAME))


@pytest.mark.parametrize("folder", MANIFESTS, ids=lambda folder: folder.name)
def test_a_manifest_is_read_whole(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.document == json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest.model_dump() == manifest.document
    assert manifest.versions["upcycle"] == "0.1.0"
    assert manifest.result.files or manifest.result.weights
    assert made_here(folder)


def test_an_uptrained_folder_goes_back_to_the_source_of_its_conversion() -> None:
    converted, uptrained = read_manifest(RUN / "converted"), read_manifest(RUN / "uptrained")
    assert converted is not None
    assert uptrained is not None
    assert origin_of(uptrained) == origin_of(converted)
    assert {"config.json", WEIGHTS, "tokenizer.json"} == set(origin_of(converted))
    student = {name: converted.result.files[name] for name in ("config.json", WEIGHTS)}
    assert uptrained.source.document["student"] == student
    assert set(uptrained.result.weights) == {WEIGHTS}
    assert [layer.layer for layer in measured_layers(converted)] == [0, 1]
    assert all(layer.refinement for layer in measured_layers(converted))
    assert measured_layers(uptrained) == []


def test_an_export_is_read() -> None:
    manifest = folder_manifest(RUN / "model-tokenizer")
    assert manifest is not None
    assert manifest.options.context == 64
    assert manifest.result.decoder.masks == {"causalMask": None}
    assert manifest.result.package
    assert folder_manifest(RUN / "converted") is None


def says(now: Any, before: Any) -> bool:
    """Whether a document says all that another one does, at the same places."""
    if isinstance(before, dict):
        return all(key in now and says(now[key], before[key]) for key in before)
    if isinstance(before, list):
        return len(now) == len(before) and all(map(says, now, before))
    return bool(now == before)


def test_the_comparison_and_the_report_are_read_whole(tmp_path: Path) -> None:
    comparison = read_document(Comparison, COMPARISON)
    assert says(comparison.to_dict(), json.loads(COMPARISON.read_text()))
    report = read_document(ReportDocument, RUN / "report" / "report.json")
    assert report.comparison == comparison
    assert "What merging left behind, by layer" in render_html(report)
    write_report(report, tmp_path)
    stored = [json.loads((at / "report.json").read_text()) for at in (tmp_path, RUN / "report")]
    assert says(*stored)
    assert report.training == read_training_log(RUN / "training" / "log.jsonl")


def test_the_record_of_a_run_says_what_is_its_own() -> None:
    records = Records(RUN / "stages.json")

    def is_own(name: str, folder: Path) -> bool:
        stage: Any = SimpleNamespace(name=name, output=folder, manifest=folder / MANIFEST_NAME)
        return records.is_own(stage)

    assert is_own("convert", RUN / "converted")
    assert is_own("train", RUN / "uptrained")
    assert is_own("evaluate", RUN / "evaluation")
    assert not is_own("convert", RUN / "report")


def test_a_training_state_tells_of_its_run_and_is_refused_by_name_without_its_weights() -> None:
    facts, uptrained = newest_facts(RUN / "training"), read_manifest(RUN / "uptrained")
    assert facts is not None
    assert uptrained is not None
    assert facts.document["steps"] == 4
    assert facts.rows is not None
    assert facts.text is not None
    known = {**uptrained.options.document, **uptrained.source.document}
    assert {key: known[key] for key in facts.document} == facts.document
    with pytest.raises(TrainingError, match="step-4 is incomplete") as refused:
        find_state(RUN / "training")
    assert refused.value.fix == "remove the folder to train from the beginning"


@pytest.mark.parametrize("key", ["models", "noise_floor"])
def test_another_layout_is_refused_by_name(tmp_path: Path, key: str) -> None:
    document = json.loads(COMPARISON.read_text())
    del document[key]
    (tmp_path / COMPARISON.name).write_text(json.dumps(document))
    with pytest.raises(EvaluationError, match=rf"comparison\.json is not what .* see {key}"):
        read_document(Comparison, tmp_path / COMPARISON.name)
