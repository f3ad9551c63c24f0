"""The fix of a file with too many bad rows names what the caller can do about it, and no more."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from tests.training.runs import tiny_run
from upcycle.cli import convert as _convert  # noqa: F401 - registers the command
from upcycle.cli import sweep as _sweep  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.errors import DataError
from upcycle.evaluation.held_out import read_held_out
from upcycle.models.loading import load_tokenizer
from upcycle.options.evaluate import EvaluateOptions
from upcycle.training.rows import training_rows

ALLOWED = "up to 1 % of a file's rows may be bad"


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' * 6 + "{no json\n" * 6)
    return path


def test_commands_without_a_recipe_name_none(tmp_path: Path, bad: Path) -> None:
    source = str(tiny_checkpoint(tmp_path / "source"))
    calibrated = ["--calibration", str(bad), "--calibration-tokens", "512"]
    for words in (
        ["convert", source, str(tmp_path / "out"), "--kv-heads", "2", *calibrated],
        ["sweep", source, "--kv-heads", "2", "--sequence-length", "32", "--text", str(bad)],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        fix = result.stderr.splitlines()[-1]
        assert fix.endswith(ALLOWED), fix
        assert "recipe" not in fix


def test_so_does_a_column_that_is_not_there(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run.text.write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(DataError) as caught:
        training_rows(run.student, run.recipe())
    assert "or name it with train.data.text_column" in caught.value.fix
    with pytest.raises(DataError) as caught:
        read_held_out(EvaluateOptions(text=[run.text]), load_tokenizer(run.student))
    assert caught.value.fix.startswith("call that column 'text'; chats are 'messages'")


def test_recipes_have_their_own_key(tmp_path: Path, bad: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(DataError) as caught:
        training_rows(run.student, run.recipe(data={"sources": [{"path": bad}]}))
    assert caught.value.fix.endswith(f"{ALLOWED} (train.data.max_bad_share in a recipe)")
    with pytest.raises(DataError) as caught:
        read_held_out(EvaluateOptions(text=[bad]), load_tokenizer(run.student))
    assert caught.value.fix.endswith(f"{ALLOWED} (evaluate.max_bad_share in a recipe)")
