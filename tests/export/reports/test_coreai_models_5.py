"""apple/coreai-models#5, apple/coreai-torch#6: a cache write at a run-time index.

It crashes the Neural Engine's compiler of the successor stack (`addOpToNetwork`), which wants K
and V given out instead.
"""

from tests.export.planted import rules
from upcycle.program.graph import Graph


def test_states_are_noted_and_the_read_only_form_has_no_write(
    exported: Graph, read_only: Graph
) -> None:
    assert "run-time-index" in rules(exported, without="")
    assert "run-time-index" not in rules(read_only, without="")
    assert not {"slice_update", "write_state", "read_state"} & read_only.decode.histogram.keys()
    assert read_only.decode.kv.cache_outputs == ("newKey0", "newValue0", "newKey1", "newValue1")
