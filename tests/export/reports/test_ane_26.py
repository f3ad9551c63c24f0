"""maderix/ANE#26: an axis is too long for the Neural Engine, at 16,384 or at 65,536.

Reports contradict each other, so the smaller limit is a note and the larger one a warning.
"""

from pathlib import Path

import pytest
import torch

from tests.export.planted import plant, rules


@pytest.mark.parametrize(
    ("axis", "broken"),
    [
        (16_384, set()),
        (16_385, {"axis-16384"}),
        (65_536, {"axis-16384"}),
        (65_537, {"axis-65536"}),
        (70_016, {"axis-65536"}),
    ],
)
def test_long_axes_are_found(tmp_path: Path, axis: int, broken: set[str]) -> None:
    linear = torch.nn.Linear(2, axis, bias=False)
    graph = plant(tmp_path, torch.nn.Sequential(linear), {"x": torch.ones(1, 2)})
    assert rules(graph, without="") & {"axis-16384", "axis-65536"} == broken
