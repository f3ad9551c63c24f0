"""NVIDIA/Megatron-LM#535, huggingface/candle#3520: rotary angles computed in half precision."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.export.planted import plant, position, rules
from upcycle.program.graph import Graph


class Rotary(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        frequencies = 10000 ** (-torch.arange(16) / 16)
        angles = position.float()[:, None] * frequencies
        return x * torch.cat([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize(("precision", "broken"), [("FLOAT16", True), ("FLOAT32", False)])
def test_angles_in_fp16_are_errors(tmp_path: Path, precision: str, broken: bool) -> None:
    inputs = {"x": torch.ones(1, 32), "position": position()}
    graph = plant(tmp_path, Rotary(), inputs, precision=precision)
    found = rules(graph)
    assert ("fp16-angles" in found) == broken
    assert ("fp32" in found) != broken


def test_ours_reads_tables(exported: Graph, read_only: Graph) -> None:
    for function in (*exported.functions.values(), read_only.decode):
        assert not {"cos", "sin"} & function.histogram.keys()
        assert function.histogram["gather"] == 3
