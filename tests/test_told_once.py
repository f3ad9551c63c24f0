"""What `run` and `train` tell beside their results: all of it, once, under --json too."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline_runs import call, tiny_pipeline
from upcycle.errors import TrainingError
from upcycle.export import risks
from upcycle.training.team import peers


def test_run_tells_what_convert_would_warn_of(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    (tmp_path / "source" / "generation_config.json").write_text('{"use_cache": false}')
    ran = call("run", pipeline.recipe)
    assert ran.exit_code == 0, ran.output
    warned = [line for line in ran.stderr.splitlines() if line.startswith("warning: ")]
    assert [line for line in warned if "use_cache is false" in line]
    assert max(Counter(warned).values()) == 1
    assert "training text: 5,765 of 6,048 tokens (95.3%) are targets" in ran.stdout

    ran = call("run", pipeline.recipe, f"output={tmp_path / 'other'}", "--json")
    found = json.loads(ran.stdout)
    assert [f"warning: {text}" for text in found["warnings"]] == warned
    assert found["notes"] == ["training text: 5,765 of 6,048 tokens (95.3%) are targets"]


def test_run_tells_what_a_conversion_leaves_behind(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"x")
    line = "left behind, since it may hold weights in another form: pytorch_model.bin"
    found = json.loads(call("run", pipeline.recipe, "--json").stdout)
    assert found["notes"].count(line) == 1
    alone = call("convert", tmp_path / "source", tmp_path / "alone", "--kv-heads", 2)
    assert alone.stdout.splitlines().count(line) == 1


def test_run_tells_what_export_would_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risks, "device_notes", lambda made, *, core_ai: [f"{made}, {core_ai}"])
    monkeypatch.setattr("upcycle.export.coreml.export_coreml", _no_export)
    pipeline = tiny_pipeline(tmp_path)
    ran = call("run", pipeline.recipe, "export.context=32")
    assert "note: the export, False" in ran.stdout, ran.output


def _no_export(checkpoint: Path, package: Path, *_: Any, **__: Any) -> str:
    package.mkdir()
    return "the export"


def test_train_tells_each_change_once(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2)
    assert call("run", pipeline.recipe).exit_code == 0
    words = ("train.steps=4", "--resume", "--allow-change", "steps", "--overwrite")
    trained = call("train", pipeline.recipe, *words)
    assert trained.exit_code == 0, trained.output
    told = Counter(trained.stdout.splitlines())
    assert told["changed: steps 2 → 4 after step 2"] == 1
    assert max(told.values()) == 1


def test_a_lost_process_is_no_bug_of_ours() -> None:
    with pytest.raises(TrainingError, match="another process of the run ended"), peers():
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] closed")
    with pytest.raises(RuntimeError, match="mat1 and mat2"), peers():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
