"""apple/coremltools#2510, apple/coreai-models#279: weights quantised per block.

The Neural Engine supports `per-cout/per-tensor quantization` only: the CPU runs the rest, and
per-block int8 came out of it with a cosine of 0.367 and no error.
"""

from pathlib import Path

import pytest
import torch

from tests.export.planted import plant, rules
from upcycle.export.quiet import quiet_coremltools
from upcycle.program.counting import count_traffic
from upcycle.program.reading import read_graph


@pytest.mark.parametrize(
    ("granularity", "dtype", "broken", "stored"),
    [
        ("per_channel", "int4", False, 64 * 128 // 2 + 64 * 2),
        ("per_block", "int4", True, 64 * 128 // 2 + 64 * 4 * 2),
        ("per_block", "int8", True, 64 * 128 + 64 * 4 * 2),
    ],
)
def test_blocks_are_warned_of(
    tmp_path: Path, granularity: str, dtype: str, broken: bool, stored: int
) -> None:
    linear = torch.nn.Linear(128, 64, bias=False)
    plant(tmp_path, torch.nn.Sequential(linear), {"x": torch.ones(1, 128)})
    with quiet_coremltools():
        import coremltools as ct
        from coremltools.optimize import coreml as cto

        config = cto.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype=dtype,
            granularity=granularity,
            block_size=32,
            weight_threshold=0,
        )
        model = ct.models.MLModel(str(tmp_path / "planted.mlpackage"), skip_model_load=True)
        small = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))
        small.save(str(tmp_path / "small.mlpackage"))
    graph = read_graph(tmp_path / "small.mlpackage")
    assert ("per-block" in rules(graph)) == broken
    assert graph.weight_bytes - 64 * 2 == stored  # the rest is a bias
    assert count_traffic(graph.decode).weights == graph.weight_bytes
