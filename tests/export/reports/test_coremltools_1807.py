"""apple/coremltools#1807, #1170, #1799: more weights than a device takes.

Beyond 2 GB packages do not load (`Error in declaring network.`); from 1.0 GB on some have run on
the GPU without saying so.
"""

from pathlib import Path

import pytest

from tests.export.planted import rules
from upcycle.program.graph import Function, Graph
from upcycle.program.operation import Operation, TensorType, Weight


@pytest.mark.parametrize(
    ("elements", "broken"),
    [
        (499_000_000, set()),
        (501_000_000, {"weights-1GB"}),
        (1_001_000_000, {"weights-2GB"}),
    ],
)
def test_the_bytes_of_the_weights_have_a_budget(elements: int, broken: set[str]) -> None:
    kind = TensorType((elements,), "float16")
    weight = Weight(kind.nbytes, Path("weight.bin"), 64)
    one = Function((Operation("const", {}, ("w",)),), {"w": kind}, {}, {"w": weight})
    # Two functions that share their weights need them once.
    graph = Graph({"main": one, "prefill": one}, {}, "main")
    assert graph.weight_bytes == 2 * elements
    assert rules(graph) == broken
