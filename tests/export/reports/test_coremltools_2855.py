"""apple/coremltools#2855: fused attention refuses grouped heads.

`query, key, value must have a same batch dimension`: Core ML's fused attention has no groups, and
`enable_gqa=True` dies of it. Q-fold needs neither it nor copies.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.export.planted import CACHE, HEAD_DIM, HEADS, plant
from upcycle.program.graph import Graph


class Grouped(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, key, enable_gqa=True)


def test_fused_attention_still_refuses_groups(tmp_path: Path) -> None:
    inputs = {"query": torch.ones(1, HEADS, 1, HEAD_DIM), "key": torch.ones(CACHE)}
    with pytest.raises(ValueError, match="must have a same batch dimension"):
        plant(tmp_path, Grouped(), inputs)


def test_our_grouped_attention_is_two_products_without_copies(exported: Graph) -> None:
    for function in exported.functions.values():
        assert "scaled_dot_product_attention" not in function.histogram
        assert len(function.kv.contractions) == 4
        assert function.tiles == ()
