"""A run whose gradients break stops, keeps what is good, and advises a command that then works."""

import functools
import itertools
import shlex
from pathlib import Path

import pytest

from tests.regress.test_pocket_tts_262 import poison
from tests.training.runs import TinyRun, tiny_run
from tests.training.test_several_processes import recipe_file
from tests.training.test_train_commands import call
from upcycle.errors import TrainingError
from upcycle.training.log import read_log

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)


def test_every_skipped_step_is_in_the_log(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(3, 50)), float("inf"))
    with pytest.raises(TrainingError, match="5 steps in a row") as stopped:
        run.train(steps=20, checkpoint_every=2)
    log = read_log(run.folder / "out-training" / "log.jsonl")
    assert [row.step for row in log if row.skipped is not None] == [3, 4, 5, 6, 7]
    assert stopped.value.fix.startswith(
        "go on from the state after step 6 with a lower rate: `upcycle train RECIPE "
        "train.learning_rate=0.0001 --resume --allow-change learning_rate`"
    )


def test_states_from_before_are_not_rotated_away(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(4, 50)), float("inf"))
    with pytest.raises(TrainingError):
        run.train(steps=20, checkpoint_every=1, keep_last=2)
    states = {path.name for path in (run.folder / "out-training").glob("step-*")}
    assert states >= {"step-2", "step-3"}


@pytest.mark.parametrize(
    ("rate", "every"), [("1e38", 1), ("1e1", 4), slow("1e3", 4), slow("1e1", 1)]
)
def test_the_advice_works(run: TinyRun, rate: str, every: int) -> None:
    """Far too large a rate: weights that give no numbers, or no gradient, or only nonsense."""
    recipe = recipe_file(run, "run", steps=20, checkpoint_every=every, warmup_steps=0)
    broken = call("train", recipe, f"train.learning_rate={rate}")
    assert broken.exit_code == 2
    words = shlex.split(broken.stderr.split("`")[1])
    assert words[:3] == ["upcycle", "train", str(recipe)]
    assert [word for word in words if "learning_rate=" in word] == ["train.learning_rate=0.0001"]
    done = call(*words[1:])
    assert done.exit_code == 0, done.stderr


def test_a_rate_that_broke_half_way_goes_on_from_there(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(run, "run", steps=20, checkpoint_every=2)
    with monkeypatch.context() as patch:
        poison(patch, set(range(6, 50)), float("nan"))
        broken = call("train", recipe, "--overwrite")
    assert broken.exit_code == 2
    words = shlex.split(broken.stderr.split("`")[1])
    assert words[3:] == [
        "--overwrite", "train.learning_rate=0.0001", "--resume", "--allow-change", "learning_rate",
    ]  # fmt: skip
    done = call(*words[1:])
    assert done.exit_code == 0, done.stderr
    assert "went on after step" in done.stdout
    assert "changed: learning_rate 0.001 → 0.0001" in done.stdout


def test_the_advice_allows_what_has_changed_since_the_state_that_is_left(run: TinyRun) -> None:
    recipe = recipe_file(run, "run", steps=20, checkpoint_every=2, warmup_steps=0)
    assert call("train", recipe, "train.steps=6").exit_code == 0
    words = ["--resume", "--overwrite", "--allow-change", "steps", "--allow-change"]
    broken = call("train", recipe, "train.learning_rate=1e38", *words, "learning_rate")
    assert broken.exit_code == 2
    words = shlex.split(broken.stderr.split("`")[1])
    allowed = [after for word, after in itertools.pairwise(words) if word == "--allow-change"]
    assert allowed == ["learning_rate", "steps"]
    done = call(*words[1:])
    assert done.exit_code == 0, done.stderr
