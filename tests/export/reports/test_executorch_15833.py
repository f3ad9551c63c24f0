"""pytorch/executorch#15833, stablehlo-coreml#89: fused attention is where models break.

Llama's text degraded with it on iOS 26; two or more of it sent whole models to the CPU
(`live input tensor not used in network`); in fp16, with several queries, the CPU crashed.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.export.planted import HEAD_DIM, HEADS, plant, rules
from upcycle.program.graph import Graph


class Fused(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x * 2, x * 3)


def test_fused_attention_is_warned_of(tmp_path: Path, exported: Graph, read_only: Graph) -> None:
    graph = plant(tmp_path, Fused(), {"x": torch.ones(1, HEADS, 4, HEAD_DIM)})
    assert graph.decode.histogram["scaled_dot_product_attention"] == 1
    assert "fused-attention" in rules(graph)
    assert "fused-attention" not in rules(exported) | rules(read_only)
