"""apple/coremltools#2500, #2548, #2537, #2600: flexible shapes beside states.

`std::bad_cast`, `FlexibleShapeInformation attribute is missing`, -14, or everything on the CPU.
"""

from pathlib import Path

from tests.export.planted import CACHE, SliceWrite, hidden, plant, position, rules
from upcycle.export.quiet import quiet_coremltools
from upcycle.program.description import describe_package
from upcycle.program.graph import Graph


def test_a_flexible_input_is_warned_of_and_its_bytes_are_not_invented(tmp_path: Path) -> None:
    with quiet_coremltools():
        from coremltools import RangeDim

    inputs = {"x": hidden(8), "position": position()}
    shapes = {"x": (1, RangeDim(1, 32, default=8), 64)}
    graph = plant(tmp_path, SliceWrite(CACHE, CACHE), inputs, shapes=shapes)
    assert "dynamic-shape" in rules(graph)

    document = describe_package(tmp_path / "planted.mlpackage")
    function = document["functions"]["main"]
    assert function["traffic"] is None
    assert function["inputs"]["x"] == "[1, 1..32, 64]"
    assert function["state_bytes"] == 2 * 2 * 64 * 32 * 2
    assert function["tiles"]["kv"]["count"] == 2
    assert document["compared"] == []


def test_ours_are_static(exported: Graph, read_only: Graph) -> None:
    assert "dynamic-shape" not in rules(exported) | rules(read_only)
