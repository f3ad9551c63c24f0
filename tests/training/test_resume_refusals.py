"""A run goes on only as the same run."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_checkpoint
from tests.training.runs import TinyRun, tiny_run
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.staging import locked
from upcycle.errors import OutputError, TrainingError


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    found = tiny_run(tmp_path)
    found.train(steps=2)
    return found


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"learning_rate": 2e-3}, "learning_rate was 0.001 and is 0.002"),
        ({"steps": 3}, "steps was 2 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"sequence_length": 12}, "rows was"),
        ({"trainable": "kv"}, "trainable was 'all' and is 'kv'"),
        ({"micro_batch_size": 8}, "micro_batch_size was 4 and is 8"),
    ],
)
def test_another_recipe(run: TinyRun, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(TrainingError) as caught:
        run.train(resume=True, overwrite=True, **{"steps": 2, **changes})
    assert what in caught.value.what


def test_another_text(run: TinyRun) -> None:
    run.text.write_text(run.text.read_text().replace("quick", "quiet"))
    with pytest.raises(TrainingError, match="rows was"):
        run.train(steps=2, resume=True, overwrite=True)


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_another_checkpoint(run: TinyRun, which: str) -> None:
    tiny_checkpoint(run.folder / which, seed=5)
    with pytest.raises(TrainingError, match=f"{which} was"):
        run.train(steps=2, resume=True, overwrite=True)


def test_what_does_not_touch_the_weights_may_change(run: TinyRun) -> None:
    result = run.train(
        steps=2, resume=True, overwrite=True, checkpoint_every=1, keep_last=9, evaluate_every=1
    )
    assert result.notes == ("went on after step 2",)


def test_resume_without_a_state_is_a_start(tmp_path: Path) -> None:
    assert tiny_run(tmp_path).train(steps=2, resume=True).steps == 2


def test_only_one_run_writes_its_training_folder(run: TinyRun) -> None:
    work = run.folder / "out-training"
    before = hash_folder(work)
    with locked(work, work), pytest.raises(OutputError, match="another process is writing"):
        run.train(steps=2, resume=True, overwrite=True)
    assert hash_folder(work) == before


def test_a_training_folder_that_cannot_be_made(run: TinyRun) -> None:
    (run.folder / "file").write_text("a file")
    with pytest.raises(OutputError, match="cannot write"):
        run.train("other", work="file")
