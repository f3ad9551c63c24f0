"""Keys and values are found by what becomes of them, in anyone's package."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.export.planted import (
    CACHE,
    CONTEXT,
    GROUPS,
    HEAD_DIM,
    HEADS,
    Attention,
    SliceWrite,
    hidden,
    plant,
    position,
)
from tests.tiny import tiny_checkpoint
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.program.bandwidth import alternatives, attention_shape, exported_shape
from upcycle.program.counting import count_traffic
from upcycle.program.graph import Function
from upcycle.program.inferred import inferred_shape
from upcycle.program.operation import Operation, TensorType
from upcycle.program.reading import read_graph

CACHED = GROUPS * CONTEXT * HEAD_DIM * 2  # bytes of the keys of one layer
REPEATED = HEADS * CONTEXT * HEAD_DIM * 2
NEW = GROUPS * HEAD_DIM * 2
SHAPE = {
    "num_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dims": 2 * HEAD_DIM,
    "context": CONTEXT,
    "tokens": 1,
}


class Unified(Attention):
    """One state [2L, g, C, d] and `.repeat`, as ANEMLL does it."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        new = slice(position[0], position[0] + 1)
        self.cache0[0:1, :, new] = self.keys(x)
        self.cache0[1:2, :, new] = self.keys(x) * 3
        repeats = (1, HEADS // GROUPS, 1, 1)
        return self.attend(x, self.cache0[0:1].repeat(repeats), self.cache0[1:2].repeat(repeats))


class Interleaved(SliceWrite):
    """States of one layer and `repeat_interleave`."""

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        n = HEADS // GROUPS
        return super().attend(x, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), mask)


class Joined(Attention):
    """Past K and V as inputs, joined with the new ones, which are also outputs."""

    def forward(self, x: Tensor, past: Tensor, past_values: Tensor) -> tuple[Tensor, ...]:
        k, v = self.keys(x), self.keys(x) * 3
        attended = self.attend(x, torch.cat([past, k], 2), torch.cat([past_values, v], 2))
        return attended, k, v


class WithoutCache(Attention):
    """A whole sequence at once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.keys(x), self.keys(x) * 3)


def stepped() -> dict[str, Tensor]:
    return {"x": hidden(), "position": position()}


def test_one_state_for_all(tmp_path: Path) -> None:
    graph = plant(tmp_path, Unified((2, *CACHE[1:])), stepped())
    traffic = count_traffic(graph.decode)
    assert [tile.of_kv for tile in graph.decode.tiles] == [True, True]
    assert (traffic.kv_read, traffic.kv_write) == (2 * CACHED, 2 * NEW)
    assert traffic.copies == 2 * 2 * REPEATED
    assert inferred_shape(graph.decode) == SHAPE


def test_states_by_layer_and_a_repeat_that_also_transposes(tmp_path: Path) -> None:
    graph = plant(tmp_path, Interleaved(CACHE, CACHE), stepped())
    traffic = count_traffic(graph.decode)
    assert [tile.of_kv for tile in graph.decode.tiles] == [True, True]
    assert sum(tile.nbytes for tile in graph.decode.tiles) == 2 * REPEATED
    assert (traffic.kv_read, traffic.kv_write) == (2 * CACHED, 2 * NEW)
    assert traffic.copies > 2 * 2 * REPEATED
    assert inferred_shape(graph.decode) == SHAPE


def test_caches_as_inputs(tmp_path: Path) -> None:
    past = torch.zeros(CACHE)
    graph = plant(tmp_path, Joined(), {"x": hidden(), "past": past, "past_values": past})
    traffic = count_traffic(graph.decode)
    assert graph.decode.kv.cache_inputs == ("past", "past_values")
    assert graph.decode.kv.cache_outputs == graph.decode.outputs[1:]
    longer = (CONTEXT + 1) / CONTEXT
    assert (traffic.kv_read, traffic.kv_write) == (2 * CACHED, 2 * NEW)
    assert traffic.copies == 2 * 2 * (CACHED + REPEATED) * longer
    assert inferred_shape(graph.decode) == SHAPE
    assert [row.num_key_value_heads for row in alternatives(graph)] == [8, 2, 2, 1]


def test_without_a_cache_new_keys_are_copied(tmp_path: Path) -> None:
    graph = plant(tmp_path, WithoutCache(), {"x": hidden(CONTEXT)})
    traffic = count_traffic(graph.decode)
    assert [tile.of_kv for tile in graph.decode.tiles] == [True, True]
    assert (traffic.kv_read, traffic.kv_write) == (0, 0)
    assert traffic.copies == 2 * 2 * REPEATED
    assert inferred_shape(graph.decode) is None
    assert alternatives(graph) == []


@pytest.mark.parametrize(
    ("attention", "kv_cache"),
    [("qfold", "state"), ("repeat-kv", "state"), ("qfold", "read-only")],
)
def test_the_shape_of_our_own_packages_is_found_without_their_manifest(
    tmp_path: Path, attention: str, kv_cache: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=2)
    package = tmp_path / "model.mlpackage"
    export_coreml(
        source,
        package,
        ExportOptions(context=96, prefill=16, attention=attention, kv_cache=kv_cache),
    )
    graph = read_graph(package)
    noted = exported_shape(graph)
    assert noted is not None
    assert inferred_shape(graph.functions["main"]) == noted | {"tokens": 1}
    assert inferred_shape(graph.functions["prefill"]) == noted | {"tokens": 16}
    graph.metadata.pop("upcycle")  # type: ignore[attr-defined]
    assert attention_shape(graph) == noted
    # What both functions need is stored once.
    assert graph.weight_bytes < 1.02 * graph.decode.weight_bytes


def test_a_tile_of_rotary_tables_is_none_of_keys() -> None:
    """glm and its kin repeat cosines in their rotary function."""
    half = TensorType((1, 1, 1, 8), "float16")
    function = Function(
        (
            Operation("tile", {"x": ("cos",), "reps": ("reps",)}, ("twice",)),
            Operation("mul", {"x": ("key",), "y": ("twice",)}, ("rotated",)),
            Operation("matmul", {"x": ("query",), "y": ("rotated",)}, ("scores",)),
        ),
        dict.fromkeys(("cos", "key", "query", "twice", "rotated", "scores"), half),
        states={},
        weights={},
    )
    assert [tile.of_kv for tile in function.tiles] == [False]
