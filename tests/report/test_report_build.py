"""What goes into report.json."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.example import document, example
from upcycle.checkpoint.manifest import Manifest, hash_file
from upcycle.report.build import MOST_POINTS, build_report, read_training_log
from upcycle.report.schema import HeldOutPoint, ReportDocument, Training, TrainingPoint


def write_log(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "tokens": 100 * number, "loss": loss, "ce": 0.0, "kl": loss, "lr": 0.1}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for label in ("source", "converted", "uptrained"):
        folder = tmp_path / "somewhere" / label
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(label.encode())
        found[label] = folder
    Manifest.of(stage="convert", source={}, options={"kv_heads": 2}, libraries=[], result={}).write(
        found["converted"]
    )
    return found


def test_the_document_has_exactly_the_documented_keys(folders: dict[str, Path]) -> None:
    built = build_report(example().comparison, folders=folders, command="upcycle eval …")
    documented = inspect.getdoc(ReportDocument) or ""
    assert all(f"\n    {key}: " in documented for key in built.to_dict())
    assert set(document()) == set(built.to_dict())


def test_provenance_holds_hashes_and_manifests_but_no_paths(folders: dict[str, Path]) -> None:
    built = build_report(example().comparison, folders=folders, command="upcycle eval …")
    source, converted, uptrained = built.provenance
    weights = folders["uptrained"] / "model.safetensors"
    assert uptrained.files == {"model.safetensors": hash_file(weights)}
    assert source.manifest is None
    assert converted.manifest is not None
    assert converted.manifest.options.document == {"kv_heads": 2}
    assert "somewhere" not in json.dumps(built.to_dict())


def test_a_log_becomes_a_loss_curve_with_its_evaluations(tmp_path: Path) -> None:
    rows = [
        step(1, 0.9),
        {"step": 2, "skipped": "loss is not finite", "rows": [3]},
        step(2, 0.5),
        {"step": 2, "heldout_kl": 0.4, "heldout_nll": 3.5},
        {"step": 2, "resumed": True, "notes": []},
        step(3, 0.3),
    ]
    training = read_training_log(write_log(tmp_path / "log.jsonl", rows))
    assert training == Training(
        steps=3,
        tokens=300,
        points=[TrainingPoint(1, 0.9), TrainingPoint(2, 0.5), TrainingPoint(3, 0.3)],
        held_out=[HeldOutPoint(2, kl=0.4, nll=3.5)],
    )


def test_a_long_log_is_thinned_out_and_keeps_its_ends(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [step(i, 1 / i) for i in range(1, 5001)])
    training = read_training_log(log)
    assert training is not None
    steps = [point.step for point in training.points]
    assert len(steps) == MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 5000)
    assert steps == sorted(set(steps))


def test_a_log_without_steps_is_no_training(tmp_path: Path) -> None:
    assert read_training_log(write_log(tmp_path / "log.jsonl", [])) is None
