"""`upcycle train` and `upcycle doctor` from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

import upcycle.cli.doctor
import upcycle.cli.train  # noqa: F401 - registers the command
from tests.training.runs import tiny_run
from upcycle.cli.app import app


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    run = tiny_run(tmp_path)
    output = tmp_path / "run"
    output.mkdir()
    shutil.copytree(run.student, output / "converted")
    train = json.loads(run.recipe().model_dump_json(exclude_none=True))
    document = {
        "source": "teacher",
        "output": "run",
        "convert": {"kv_heads": 8},
        "train": train,
        "evaluate": {"sequence_length": 64},
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_train_and_resume(recipe: Path) -> None:
    done = call("train", recipe, "train.steps=2")
    assert done.exit_code == 0, done.output
    assert "KL(source || model)" in done.stdout
    assert (recipe.parent / "run" / "uptrained" / "model.safetensors").is_file()
    again = call("train", recipe, "train.steps=2")
    assert again.exit_code == 2
    assert "uptrained exists" in again.stderr
    shutil.rmtree(recipe.parent / "run" / "uptrained")
    assert "--resume" in call("train", recipe, "train.steps=2").stderr
    resumed = call("train", recipe, "train.steps=2", "--resume", "--json")
    assert resumed.exit_code == 0
    unknown, went_on = json.loads(resumed.stdout)["notes"]
    assert unknown.startswith("converted does not say what it was made from")
    assert went_on == "went on after step 2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=2", "did you mean 'steps'?"),
        ("train=null", "the recipe has no train section"),
        ("output=elsewhere", "there is no converted checkpoint"),
    ],
)
def test_requests_at_fault(recipe: Path, override: str, message: str) -> None:
    failed = call("train", recipe, override)
    assert failed.exit_code == 2
    assert message in failed.stderr
    assert "  where: " in failed.stderr
    assert "  fix: " in failed.stderr


def test_doctor(recipe: Path) -> None:
    good = call("doctor", recipe)
    assert good.exit_code == 0
    assert good.stdout.splitlines()[0].startswith(" 1. ok      versions: ")
    bad = recipe.read_text().replace("kv_heads: 8", "kv_heads: 5")
    recipe.write_text(bad)
    overridden = call("doctor", recipe, "convert.kv_heads=8", "--json")
    assert overridden.exit_code == 0
    failed = call("doctor", recipe, "--json")
    assert failed.exit_code == 1
    checks = json.loads(failed.stdout)["checks"]
    assert [check["name"] for check in checks if not check["passed"]] == ["conversion"]
