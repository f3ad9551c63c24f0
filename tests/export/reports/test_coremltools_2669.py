"""apple/coremltools#2669, cactus#734: a mask of -inf, or of -1e9, makes NaN in fp16.

`finfo(float32).min` becomes -inf, and a fully masked row has no softmax.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.export.planted import CONTEXT, Attention, hidden, plant, rules
from upcycle.program.graph import Graph


class Masked(Attention):
    """A causal mask that lies in the weight file."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        self.mask = torch.triu(torch.full((CONTEXT, CONTEXT), hides), 1)[None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.keys(x), self.keys(x), self.mask)


class Computed(Attention):
    """A mask made of 0 and 1, by a constant of the program itself."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        self.hides = hides

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.attend(x, self.keys(x), self.keys(x), (1 - seen) * self.hides)


@pytest.mark.parametrize(
    ("hides", "broken"), [(torch.finfo(torch.float32).min, True), (-1e9, True), (-4e4, False)]
)
def test_masks_beyond_fp16_are_errors(tmp_path: Path, hides: float, broken: bool) -> None:
    stored = plant(tmp_path, Masked(hides), {"x": hidden(CONTEXT)})
    assert ("beyond-fp16" in rules(stored)) == broken
    inputs = {"x": hidden(CONTEXT), "seen": torch.ones(1, 1, CONTEXT, CONTEXT)}
    computed = plant(tmp_path, Computed(hides), inputs)
    assert ("beyond-fp16" in rules(computed)) == broken


def test_ours_are_finite(exported: Graph, read_only: Graph) -> None:
    assert "beyond-fp16" not in rules(exported) | rules(read_only)
