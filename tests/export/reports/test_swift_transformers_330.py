"""huggingface/swift-transformers#330: it fills only one mask, but sliding windows need a second."""

from pathlib import Path

import torch
from torch import Tensor

from tests.export.planted import CONTEXT, Attention, hidden, plant, rules
from upcycle.program.graph import Graph


class TwoMasks(Attention):
    def forward(self, x: Tensor, causalMask: Tensor, slidingMask: Tensor) -> Tensor:
        keys = self.keys(x)
        seen = self.attend(x, keys, keys, causalMask)
        return seen + self.attend(x, keys, keys, slidingMask)


def test_a_second_mask_is_noted(tmp_path: Path, exported: Graph) -> None:
    mask = torch.zeros(1, 1, CONTEXT, CONTEXT)
    inputs = {"x": hidden(CONTEXT), "causalMask": mask, "slidingMask": mask}
    graph = plant(tmp_path, TwoMasks(), inputs)
    assert "several-masks" in rules(graph, without="")
    assert "several-masks" not in rules(exported, without="")
