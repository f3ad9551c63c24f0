"""One bad step poisons the weights (kyutai-labs/pocket-tts PR #262, pytorch/torchtitan#916).

Also Nerogar/OneTrainer#1147 and marin-community/levanter#391: rotation then removes the last good
state. Here a step without a finite gradient does not move anything, and a run of them stops.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import TinyRun, tiny_run
from upcycle.errors import TrainingError
from upcycle.training.log import read_log
from upcycle.training.step import Trainer


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> None:
    """Make a gradient of the given steps, counted from 1, non-finite after the backward pass."""
    step, losses = Trainer.step, Trainer.losses
    current = [0]

    def counting_step(self: Trainer, number: int) -> Any:
        current[0] = number + 1
        return step(self, number)

    def poisoned_losses(self: Trainer, model: Any, batch: Any) -> Any:
        sums = losses(self, model, batch)
        return sums._replace(loss=sums.loss * value) if current[0] in steps else sums

    monkeypatch.setattr(Trainer, "step", counting_step)
    monkeypatch.setattr(Trainer, "losses", poisoned_losses)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_step_is_skipped_and_named(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    poison(monkeypatch, {3}, value)
    result = run.train(checkpoint_every=1, keep_last=10)
    assert "step 3 was skipped: its gradient was not finite" in result.notes
    (skipped,) = [row for row in read_log(result.log) if row.skipped is not None]
    assert skipped.step == 3
    assert len(skipped.rows or []) == 8
    before, after = (
        load_file(run.folder / "out-training" / f"step-{step}" / "weights.safetensors")
        for step in (2, 3)
    )
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    last = load_file(result.output / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in last.values())
    assert any(not torch.equal(tensor, last[name]) for name, tensor in before.items())


def test_a_run_of_bad_steps_stops_and_keeps_the_good_state(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(3, 50)), float("inf"))
    with pytest.raises(TrainingError) as caught:
        run.train(steps=20, checkpoint_every=2, keep_last=2)
    assert "5 steps in a row" in caught.value.what
    assert caught.value.where.startswith("step 7, rows")
    for folder in (run.folder / "out-training").glob("step-*"):
        weights = load_file(folder / "weights.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert not (run.folder / "out").exists()
