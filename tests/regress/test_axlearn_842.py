"""apple/axlearn#842: KV heads laid out as tile (0 1 0 1) where repeat (0 0 1 1) was meant."""

import torch

from upcycle.attention import AttentionWeights, Rope
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.pool import repeat


def constants(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None, None].expand(-1, 2, 3).contiguous()


def test_each_query_head_sees_the_kv_head_of_its_contiguous_group() -> None:
    weights = AttentionWeights(
        q=constants(0, 1, 2, 3),
        k=constants(10, 20, 30, 50),
        v=constants(1, 2, 3, 5),
        o=constants(0, 1, 2, 3).transpose(1, 2),
        rope=Rope("half", 2),
    )
    merged = get_method("mean").merge(weights, MergeRequest(2, 0, 0, 0.02))
    assert merged.k[:, 0, 0].tolist() == [15, 40]
    assert repeat(merged, 4).k[:, 0, 0].tolist() == [15, 15, 40, 40]
