"""john-rocky/CoreML-LLM MLSTATE_PATTERN: with three states a package fails at prediction.

`ANEProgramProcessRequestDirect … status=0x1d (Error 11)`, and the CPU gives garbage.
"""

from pathlib import Path

import pytest
from torch import Tensor

from tests.export.planted import CACHE, SliceWrite, hidden, plant, position, rules
from upcycle.program.graph import Graph


class ThreeStates(SliceWrite):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        attended = super().forward(x, position)
        if hasattr(self, "cache2"):
            self.cache2[:, :, position[0] : position[0] + 1] = self.keys(x) * 5
            attended = attended + self.attend(x, self.cache2, self.cache2)
        return attended


@pytest.mark.parametrize(("states", "broken"), [(2, False), (3, True)])
def test_a_third_state_is_an_error(tmp_path: Path, states: int, broken: bool) -> None:
    inputs = {"x": hidden(), "position": position()}
    graph = plant(tmp_path, ThreeStates(*[CACHE] * states), inputs)
    assert ("many-states" in rules(graph)) == broken


def test_ours_have_at_most_two(exported: Graph, read_only: Graph) -> None:
    assert len(exported.decode.states) == 2
    assert len(read_only.decode.states) == 0
