"""Saving after a resumption fails or counts anew (huggingface/accelerate#1601, #3306).

There the automatic name restarts at 0 and "Checkpoint directory … already exists". Here a state is
named by its step, and a resumed run goes on counting.
"""

from pathlib import Path

from tests.training.runs import tiny_run


def test_a_resumed_run_saves_under_the_next_steps(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run.train("out", steps=4)
    work = tmp_path / "out-training"
    # The newest state is damaged, so its name exists when the resumed run comes to save it.
    (work / "step-4" / "state.json").write_text("{")
    result = run.train("out", steps=4, resume=True, overwrite=True)
    assert result.steps == 4
    assert {path.name for path in work.glob("step-*")} == {"step-2", "step-4"}
    assert run.train("out", steps=4, resume=True, overwrite=True).notes == ("went on after step 4",)
