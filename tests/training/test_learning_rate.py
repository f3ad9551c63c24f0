"""The learning rate is a function of the step alone."""

import math
from pathlib import Path
from typing import Any

import pytest

from upcycle.options.train import TrainOptions
from upcycle.training.step import learning_rate


def recipe(**changes: Any) -> TrainOptions:
    return TrainOptions.model_validate(
        {
            "data": {"sources": [{"path": Path("x")}]},
            "sequence_length": 8,
            "batch_size": 1,
            "micro_batch_size": 1,
            "steps": 100,
            "learning_rate": 0.5,
            "warmup_steps": 10,
            **changes,
        }
    )


def test_the_warm_up_is_linear_and_reaches_the_peak() -> None:
    rates = [learning_rate(step, recipe()) for step in range(10)]
    assert rates == pytest.approx([0.05 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.5),
        ("cosine", 99, 0.5 * (1 + math.cos(math.pi * 89 / 90))),
        ("linear", 10, 1.0),
        ("linear", 55, 0.5),
        ("linear", 99, 1 / 90),
        ("wsd", 10, 1.0),
        ("wsd", 82, 1.0),
        ("wsd", 91, 1 - math.sqrt(0.5)),
        ("constant", 99, 1.0),
    ],
)
def test_shapes(schedule: str, step: int, share: float) -> None:
    assert learning_rate(step, recipe(schedule=schedule)) == pytest.approx(0.5 * share)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_every_rate_is_positive_and_never_above_the_peak(schedule: str, warmup_steps: int) -> None:
    chosen = recipe(schedule=schedule, warmup_steps=warmup_steps)
    rates = [learning_rate(step, chosen) for step in range(100)]
    assert all(0 < rate <= 0.5 for rate in rates)
    after = rates[warmup_steps:]
    assert after == sorted(after, reverse=True)


def test_a_fraction_of_the_source_steps_sets_the_length() -> None:
    by_fraction = recipe(steps=None, fraction=0.02, source_steps=5000)
    assert [learning_rate(s, by_fraction) for s in range(100)] == [
        learning_rate(s, recipe()) for s in range(100)
    ]
