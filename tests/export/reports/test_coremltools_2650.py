"""apple/coremltools#2650: attention over a batch of 10 or more is wrong on a GPU.

A form of grouped attention that puts the heads on the batch axis runs into it.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.export.planted import plant, rules
from upcycle.program.graph import Graph


class Batched(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ (x * 2).transpose(2, 3), -1) @ x


@pytest.mark.parametrize(("batch", "broken"), [(9, False), (10, True)])
def test_a_batch_of_10_is_warned_of(tmp_path: Path, batch: int, broken: bool) -> None:
    graph = plant(tmp_path, Batched(), {"x": torch.ones(batch, 2, 32, 32)})
    assert ("attention-batch" in rules(graph)) == broken


def test_ours_is_one_batch(exported: Graph, read_only: Graph) -> None:
    assert "attention-batch" not in rules(exported) | rules(read_only)
