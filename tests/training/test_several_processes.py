"""`torchrun` with two processes gives what one process gives; a killed run goes on to the same.

The rate does not depend on the processes either (huggingface/accelerate#1382, #2318 and #2708:
a prepared scheduler is stepped once for each of them).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.training.runs import TinyRun, tiny_run
from upcycle.checkpoint.manifest import hash_file
from upcycle.training.log import read_log
from upcycle.training.state import state_folders

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def recipe_file(run: TinyRun, name: str, **changes: Any) -> Path:
    output = run.folder / name
    output.mkdir()
    (output / "converted").symlink_to(run.student)
    train = json.loads(run.recipe(**changes).model_dump_json(exclude_none=True))
    document = {
        "source": "teacher",
        "output": name,
        "convert": {"kv_heads": 8},
        "train": train,
    }
    path = run.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def start(recipe: Path, *options: str, processes: int = 1) -> "subprocess.Popen[str]":
    launcher = [sys.executable]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc-per-node={processes}")
    return subprocess.Popen(
        [*launcher, "-m", "upcycle", "train", str(recipe), "--json", *options],
        env=ENVIRONMENT,
        cwd=recipe.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_one_process_with_four_micro_batches_equals_two_with_two(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    settings = {"micro_batch_size": 2, "steps": 5, "learning_rate": 1e-5}
    one = finish(start(recipe_file(run, "one", **settings)))
    two = finish(start(recipe_file(run, "two", **settings), processes=2))
    curves = [
        [row.loss for row in read_log(Path(result["log"])) if row.loss is not None]
        for result in (one, two)
    ]
    assert len(curves[0]) == 5
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    rates = [
        [row.lr for row in read_log(Path(result["log"])) if row.loss is not None]
        for result in (one, two)
    ]
    assert rates[0] == rates[1]
    assert one["heldout_kl"] == pytest.approx(two["heldout_kl"], rel=1e-5)
    weights = [load_file(Path(result["output"]) / "model.safetensors") for result in (one, two)]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-6, name


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    settings = {"steps": 80, "checkpoint_every": 1, "evaluate_every": 40, "precision": "bf16"}
    whole = finish(start(recipe_file(run, "whole", **settings)))
    recipe = recipe_file(run, "parts", **settings)
    work = tmp_path / "parts" / "training"
    for number in range(2):
        process = start(recipe, "--resume")
        newest = state_folders(work)[0].name if number else "none"
        while not state_folders(work) or state_folders(work)[0].name == newest:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "parts" / "uptrained").exists()
    parts = finish(start(recipe, "--resume"))
    name = "model.safetensors"
    assert any(note.startswith("went on after step ") for note in parts["notes"])
    assert hash_file(Path(parts["output"]) / name) == hash_file(Path(whole["output"]) / name)
    logs = [
        [(row.step, row.loss) for row in read_log(Path(result["log"])) if row.loss is not None]
        for result in (whole, parts)
    ]
    assert logs[0] == logs[1]
