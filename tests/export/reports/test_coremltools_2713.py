"""apple/coremltools#2713: a package crashes at load when an output is what a state becomes."""

from pathlib import Path

import torch
from torch import Tensor, nn

from tests.export.planted import plant, rules
from upcycle.program.graph import Graph


class Returned(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("cache", torch.zeros(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        new = x * 2
        self.cache[:] = new
        return new if self.factor == 1 else new * self.factor


def test_an_aliased_output_is_an_error(tmp_path: Path, exported: Graph) -> None:
    broken = plant(tmp_path, Returned(1), {"x": torch.ones(64, 32)})
    mended = plant(tmp_path, Returned(3), {"x": torch.ones(64, 32)})
    assert "state-alias" in rules(broken)
    assert "state-alias" not in rules(mended) | rules(exported)
