"""Gradient accumulation changes the loss (huggingface/transformers#37766, PRs #35207 and #35438).

Also axolotl-ai-cloud/axolotl#1100 and #3196. Micro-batches with different numbers of scored tokens
must not each count the same.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.runs import tiny_run
from upcycle.training.log import read_log


@pytest.mark.parametrize("losses", [(1.0, 0.0), (0.5, 0.5)])
def test_the_micro_batch_size_changes_nothing(tmp_path: Path, losses: tuple[float, float]) -> None:
    run = tiny_run(tmp_path)
    weights, curves = [], []
    for name, micro_batch_size in (("one", 8), ("four", 2)):
        result = run.train(
            name,
            micro_batch_size=micro_batch_size,
            cross_entropy=losses[0],
            distillation=losses[1],
            steps=4,
            # Adam divides by the gradient's own size: rounding in tiny gradients grows to the rate.
            learning_rate=1e-5,
        )
        weights.append(load_file(result.output / "model.safetensors"))
        curves.append([row.loss for row in read_log(result.log) if row.loss is not None])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-6, name
