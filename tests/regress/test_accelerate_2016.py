"""Resuming replays other data (huggingface/accelerate#2016, #2823, #4195 and PR #4232).

The epoch and its permutation are not saved there. Here rows are a function of the step, and a run
that is stopped in its second epoch goes on to the very same bytes.
"""

import json
from pathlib import Path

import pytest

from tests.training.runs import tiny_run
from upcycle.checkpoint.manifest import hash_file
from upcycle.progress import Progress
from upcycle.training.log import read_log


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stops", [[5], [17], [16, 20]])
def test_a_resumed_run_ends_in_the_same_bytes(
    tmp_path: Path, precision: str, stops: list[int]
) -> None:
    run = tiny_run(tmp_path)
    settings = {"steps": 24, "precision": precision, "batch_size": 8}
    whole = run.train("whole", **settings)
    num_rows = json.loads((whole.output / "upcycle.json").read_text())["source"]["rows"]["count"]
    assert 5 * 8 < num_rows < 16 * 8, "the stops are in the first epoch and in the second"
    for stop in stops:

        def stop_at(progress: Progress, stop: int = stop) -> None:
            if progress.done == stop:
                raise StoppedError

        with pytest.raises(StoppedError):
            run.train("parts", watch=stop_at, resume=True, **settings)
    parts = run.train("parts", resume=True, **settings)
    assert hash_file(parts.output / "model.safetensors") == (
        hash_file(whole.output / "model.safetensors")
    )
    assert (parts.output / "upcycle.json").read_text() == (
        (whole.output / "upcycle.json").read_text()
    )
    assert parts.heldout_kl == whole.heldout_kl

    def curve(log: Path) -> list[tuple[int, float]]:
        return [(row.step, row.loss) for row in read_log(log) if row.loss is not None]

    assert curve(parts.log) == curve(whole.log)
    assert [step for step, _ in curve(parts.log)] == list(range(1, 25))
