"""apple/coremltools#2275, #2278: `MIL program input, 'k_cache', not found in Core ML model inputs`.

A state that is written through a view and a transpose was left out of the package's description.
The version installed converts that; a package of an older one must be found out.
"""

from pathlib import Path

from torch import Tensor

from tests.export.planted import CACHE, Attention, hidden, plant, position, rules
from upcycle.program.graph import Graph
from upcycle.program.reading import read_graph
from upcycle.program.specification import read_specification


class Transposed(Attention):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        new = self.k(x).view(1, 48, 2, 32).transpose(1, 2)
        self.cache0[:, :, position[0] : position[0] + 48] = new
        return self.cache0 * 2


def test_a_state_that_the_package_does_not_declare_is_an_error(
    tmp_path: Path, exported: Graph
) -> None:
    graph = plant(tmp_path, Transposed(CACHE), {"x": hidden(48), "position": position()})
    assert graph.decode.state_writes == {"cache0": 1}
    assert "undeclared-input" not in rules(graph) | rules(exported)

    package = tmp_path / "planted.mlpackage"
    model = read_specification(package)
    del model.description.state[:]
    (program,) = package.rglob("model.mlmodel")
    program.write_bytes(model.SerializeToString())
    assert "undeclared-input" in rules(read_graph(package))
