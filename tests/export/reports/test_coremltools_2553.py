"""apple/coremltools#2553, Anemll/Anemll#27: 128 tokens per call with a state left the engine."""

from pathlib import Path

import pytest

from tests.export.planted import GROUPS, HEAD_DIM, SliceWrite, hidden, plant, position, rules

LONG = (1, GROUPS, 256, HEAD_DIM)


@pytest.mark.parametrize(("tokens", "broken"), [(64, False), (128, True)])
def test_more_than_64_tokens_per_call_are_warned_of(
    tmp_path: Path, tokens: int, broken: bool
) -> None:
    inputs = {"x": hidden(tokens), "position": position()}
    graph = plant(tmp_path, SliceWrite(LONG, LONG), inputs)
    assert ("long-update" in rules(graph)) == broken
