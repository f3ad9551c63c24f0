"""john-rocky/CoreML-LLM DECODE_STATE_LAYOUTS, apple/coremltools#2325: a shifted cache.

`cat([cache[1:], k])` into a state with tied embeddings fails to compile for the Neural Engine
(error code -14). A blend by a mask compiles, but writes the whole cache for each token.
"""

from pathlib import Path

import torch
from torch import Tensor

from tests.export.planted import CACHE, CONTEXT, Attention, hidden, plant, rules
from upcycle.program.graph import Graph


class Shift(Attention):
    def forward(self, x: Tensor) -> Tensor:
        self.cache0[:] = torch.cat([self.cache0[:, :, 1:], self.keys(x)], 2)
        return self.attend(x, self.cache0, self.cache0)


class Blend(Attention):
    def forward(self, x: Tensor, here: Tensor) -> Tensor:
        self.cache0[:] = self.cache0 * (1 - here) + self.keys(x) * here
        return self.attend(x, self.cache0, self.cache0)


def test_a_shift_is_warned_of(tmp_path: Path) -> None:
    graph = plant(tmp_path, Shift(CACHE), {"x": hidden()})
    # One finding for one cause: a shift is a rewrite, by a copy.
    assert rules(graph) & {"state-shift", "state-rewrite", "kv-copy"} == {"state-shift"}


def test_a_blend_is_a_rewrite_but_no_shift(tmp_path: Path) -> None:
    inputs = {"x": hidden(), "here": torch.ones(1, 1, CONTEXT, 1)}
    broken = rules(plant(tmp_path, Blend(CACHE), inputs))
    assert "state-rewrite" in broken
    assert "state-shift" not in broken


def test_ours_writes_in_place(exported: Graph, read_only: Graph) -> None:
    found = rules(exported) | rules(read_only)
    assert not {"state-shift", "state-rewrite", "kv-copy"} & found
