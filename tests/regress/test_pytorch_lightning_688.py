"""Resuming picks a truncated checkpoint (Lightning-AI/pytorch-lightning#688).

Also vllm-project/speculators#739 and bghira/SimpleTuner#2613. A damaged state is passed over for
the one before it, and the run says so; nothing half-written ever has a state's name.
"""

import shutil
from pathlib import Path

import pytest

from tests.training.runs import TinyRun, tiny_run
from upcycle.checkpoint.manifest import hash_file
from upcycle.errors import TrainingError


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["weights.safetensors", "moments.safetensors", "state.json"])
def test_a_truncated_state_is_passed_over(run: TinyRun, name: str) -> None:
    whole = run.train("whole")
    work = run.folder / "whole-training"
    truncate(work / "step-6" / name)
    shutil.rmtree(whole.output)
    again = run.train("whole", resume=True)
    assert any("step-6" in note and "passed over" in note for note in again.notes)
    assert "went on after step 4" in again.notes
    assert again.loss == whole.loss


def test_a_missing_file_is_passed_over(run: TinyRun) -> None:
    whole = run.train("whole")
    (run.folder / "whole-training" / "step-6" / "moments.safetensors").unlink()
    again = run.train("whole", resume=True, overwrite=True)
    assert "went on after step 4" in again.notes
    assert hash_file(again.output / "model.safetensors") == (
        hash_file(whole.output / "model.safetensors")
    )


def test_what_a_killed_save_left_behind_is_no_state(run: TinyRun) -> None:
    run.train("whole")
    work = run.folder / "whole-training"
    (work / "step-6").rename(work / ".step-8.partial")
    again = run.train("whole", resume=True, overwrite=True)
    assert "went on after step 4" in again.notes


def test_no_readable_state_is_an_error(run: TinyRun) -> None:
    run.train("whole")
    for folder in (run.folder / "whole-training").glob("step-*"):
        truncate(folder / "weights.safetensors")
    with pytest.raises(TrainingError, match="no training state can be read"):
        run.train("whole", resume=True, overwrite=True)


def test_states_are_rotated_and_the_newest_kept(run: TinyRun) -> None:
    run.train("whole", steps=7, checkpoint_every=1, keep_last=3)
    names = {path.name for path in (run.folder / "whole-training").iterdir()}
    assert names == {"step-5", "step-6", "step-7", "log.jsonl"}


def test_a_run_is_not_started_over_its_states(run: TinyRun) -> None:
    run.train("whole")
    with pytest.raises(TrainingError, match="holds the states of an earlier run"):
        run.train("other", work="whole-training")
