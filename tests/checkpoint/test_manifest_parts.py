"""A manifest of which a part is no object is the same error wherever it is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline_runs import TinyPipeline, call, tiny_pipeline
from tests.report.example import example
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import read_manifest
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError
from upcycle.report.build import build_report


def damage(folder: Path, part: str, value: Any) -> str:
    path = folder / "upcycle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))
    return str(path)


@pytest.mark.parametrize("part", ["options", "source", "versions", "result"])
@pytest.mark.parametrize("value", [[], None, "mean", 5])
def test_the_key_and_the_file_are_named(tmp_path: Path, part: str, value: Any) -> None:
    (tmp_path / "upcycle.json").write_text('{"stage": "convert"}')
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.document == {"stage": "convert"}
    where = damage(tmp_path, part, value)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert caught.value.what == f"upcycle.json is damaged: {part} is no JSON object"
    assert caught.value.where == f"{where}, {part}"
    assert "make the folder again" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[]", "it is no JSON object"), ("{}", "stage is missing"), ('{"stage": 5}', "stage is mis")],
)
def test_so_is_one_without_a_stage(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "upcycle.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"is damaged: {problem}"):
        read_manifest(tmp_path)


def test_verify_and_the_report_say_the_same(tmp_path: Path) -> None:
    source, out = tiny_checkpoint(tmp_path / "source"), tmp_path / "out"
    convert(source, out, kv_heads=2)
    damage(out, "options", [])
    problem = "damaged: options is no JSON object"
    with pytest.raises(CheckpointError, match=problem):
        verify(source, out)
    whole = example().comparison
    models = replace(whole, models=whole.models[:2])
    labels = [model.label for model in models.models]
    with pytest.raises(CheckpointError, match=problem):
        build_report(models, folders=dict(zip(labels, (source, out), strict=True)), command="x")


def test_run_and_train_say_the_same(tmp_path: Path) -> None:
    tiny: TinyPipeline = tiny_pipeline(tmp_path)
    assert tiny.convert().exit_code == 0
    damage(tiny.out / "converted", "options", "none")
    for command in ("run", "train"):
        done = call(command, tiny.recipe)
        assert done.exit_code == 2, done.output
        assert "upcycle.json is damaged: options is no JSON object" in done.stderr
