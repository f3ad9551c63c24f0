"""Found here: a cache write at a tensor index is dropped by the converter, without an error.

`cache[0, :, position] = key` traces and converts; the write and the projections before it are gone.
"""

from pathlib import Path

from torch import Tensor

from tests.export.planted import CACHE, Attention, SliceWrite, hidden, plant, position, rules
from upcycle.program.graph import Graph


class IndexWrite(Attention):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache0[0, :, position] = self.keys(x)[0]
        return self.attend(x, self.cache0, self.cache0)


def test_the_lost_write_is_an_error(tmp_path: Path) -> None:
    graph = plant(tmp_path, IndexWrite(CACHE), {"x": hidden(), "position": position()})
    assert graph.decode.histogram["linear"] == 1  # that of K is gone
    assert "unwritten-state" in rules(graph)


def test_a_slice_write_stays(tmp_path: Path, exported: Graph) -> None:
    inputs = {"x": hidden(), "position": position()}
    graph = plant(tmp_path, SliceWrite(CACHE, CACHE), inputs)
    assert graph.decode.state_writes == {"cache0": 1, "cache1": 1}
    assert "unwritten-state" not in rules(graph) | rules(exported)
