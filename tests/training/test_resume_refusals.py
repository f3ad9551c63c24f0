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
        ({"batch_size": 4}, "batch_size was 8 and is 4"),
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
        steps=2,
        resume=True,
        overwrite=True,
        checkpoint_every=1,
        keep_last=9,
        evaluate_every=1,
        micro_batch_size=8,
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


@pytest.mark.parametrize(
    "content",
    [
        b"5",
        b"[" * 9999,
        b"\xff",
        b'{"step": "x", "facts": 3, "files": {}}',
        b'{"step": 4, "facts": {}, "files": {}}',
    ],
)
def test_a_damaged_state_is_passed_over(tmp_path: Path, content: bytes) -> None:
    run = tiny_run(tmp_path)
    run.train(steps=4)
    (run.folder / "out-training" / "step-4" / "state.json").write_bytes(content)
    result = run.train(steps=4, resume=True, overwrite=True)
    assert "went on after step 2" in result.notes
    assert any(note.startswith("step-4 is ") for note in result.notes)


@pytest.mark.parametrize("line", [b"\xff\xfe", b"5", b'{"loss": 1}', b'{"step": "x"}'])
def test_a_damaged_log_is_read_up_to_the_damage(run: TinyRun, line: bytes) -> None:
    log = run.folder / "out-training" / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + line + b"\n")
    run.train(steps=2, resume=True, overwrite=True)
    lines = log.read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:-1]) == whole
    assert b"resumed" in lines[-1]


def test_a_strangers_log_stays(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    log = tmp_path / "out-training" / "log.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 1, "mine": true}\n')
    with pytest.raises(OutputError, match="was not made by upcycle"):
        run.train(steps=2, resume=True)
    assert log.read_text() == '{"step": 1, "mine": true}\n'
