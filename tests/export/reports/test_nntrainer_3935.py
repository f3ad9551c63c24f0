"""nntrainer#3935: the squares of an RMS norm overflow fp16 once a value reaches 256.

coremltools' own `rms_norm` is made the same way.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.export.planted import plant, rules
from upcycle.program.graph import Graph


class Norm(nn.Module):
    def __init__(self, mean_square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mean_square = mean_square

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return total * torch.rsqrt(self.mean_square(total) + 1e-6)


def scaled(x: Tensor) -> Tensor:
    return (x / x.abs().amax(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("mean_square", "broken"),
    [
        (lambda x: x.pow(2).mean(-1, keepdim=True), True),
        (lambda x: (x * x).mean(-1, keepdim=True), True),
        (lambda x: x.square().sum(-1, keepdim=True) / 64, True),
        (scaled, False),
    ],
)
def test_a_naive_norm_is_warned_of(
    tmp_path: Path, mean_square: Callable[[Tensor], Tensor], broken: bool
) -> None:
    inputs = {"x": torch.ones(1, 4, 64), "y": torch.ones(1, 4, 64)}
    graph = plant(tmp_path, Norm(mean_square), inputs)
    assert ("naive-norm" in rules(graph)) == broken


def test_ours_are_scaled(exported: Graph, read_only: Graph) -> None:
    assert "naive-norm" not in rules(exported) | rules(read_only)
