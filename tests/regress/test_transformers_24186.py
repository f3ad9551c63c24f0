"""Steps are miscounted when accumulating (huggingface/transformers#24186).

`run_clm_no_trainer` resumed with completed steps in micro-batches. Here a step is an optimiser step
everywhere, and the rate after resuming is that of its step.
"""

from pathlib import Path

import pytest

from tests.training.runs import tiny_run
from upcycle.progress import Progress
from upcycle.training.log import read_log
from upcycle.training.step import learning_rate


class StoppedError(Exception):
    pass


def test_steps_and_rates_with_four_micro_batches(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    settings = {"micro_batch_size": 2, "checkpoint_every": 1}
    seen = []

    def stop(progress: Progress) -> None:
        seen.append((progress.done, progress.total, progress.unit))
        if progress.done == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        run.train(watch=stop, **settings)
    result = run.train(resume=True, **settings)
    rows = [row for row in read_log(result.log) if row.loss is not None]
    recipe = run.recipe(**settings)
    assert seen == [(1, 6, "steps"), (2, 6, "steps"), (3, 6, "steps")]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.lr for row in rows] == [learning_rate(step, recipe) for step in range(6)]
    assert [row.tokens for row in rows] == [8 * 16 * step for step in range(1, 7)]
    assert [row.step for row in read_log(result.log) if row.resumed] == [3]
