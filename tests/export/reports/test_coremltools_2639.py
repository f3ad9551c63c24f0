"""apple/coremltools#2639, #2661: `identity` cannot take a state, as `.contiguous()` made it.

transformers' attention calls `.contiguous()` on what it reads.
"""

from pathlib import Path

from torch import Tensor

from tests.export.planted import CACHE, Attention, hidden, plant, position
from upcycle.program.graph import Graph


class Contiguous(Attention):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache0[:, :, position[0] : position[0] + 1] = self.keys(x)
        cache = self.cache0.contiguous()
        return self.attend(x, cache, cache)


def test_contiguous_on_a_state_converts_and_keeps_the_write(
    tmp_path: Path, exported: Graph
) -> None:
    graph = plant(tmp_path, Contiguous(CACHE), {"x": hidden(), "position": position()})
    assert graph.decode.state_writes == {"cache0": 1}
    for function in (graph.decode, *exported.functions.values()):
        assert "identity" not in function.histogram
