"""RMS norms stay exact in fp32 and finite in fp16."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.tiny import tiny_model
from upcycle.export.layers import ScaledNorm, guard_norms


class HalfRMSNorm(nn.Module):
    """The plain formula in the input's own dtype, as the exported program computes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.largest_sum = 0.0

    def forward(self, x: Tensor) -> Tensor:
        squares = x * x
        self.largest_sum = squares.float().sum(-1).max().item()
        return x * torch.rsqrt(squares.mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("kind", "epsilon"),
    [
        (LlamaRMSNorm, "variance_epsilon"),
        (GemmaRMSNorm, "eps"),
        (CohereLayerNorm, "variance_epsilon"),
    ],
)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    exponent=st.floats(-4, 4.5),
    spike=st.floats(1, 1000),
    seed=st.integers(0, 2**16),
)
def test_equals_the_plain_norm(
    kind: type, epsilon: str, size: int, exponent: float, spike: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, size, generator=generator) * 10**exponent
    x[0, 0, 0] *= spike
    norm = kind(size, eps=1e-5)
    nn.init.normal_(norm.weight, generator=generator)
    expected = norm(x)
    torch.testing.assert_close(ScaledNorm(norm, epsilon)(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [64, 576, 4096])
def test_is_right_in_fp16_where_the_plain_norm_is_zero(size: int) -> None:
    x = torch.ones(1, size, dtype=torch.float16)
    x[0, 0] = 22_500
    norm = HalfRMSNorm(size)
    assert norm(x).abs().max() == 0
    guarded = ScaledNorm(norm, "eps")
    expected = x.double() / math.sqrt((x.double() ** 2).mean())
    torch.testing.assert_close(guarded(x).double(), expected, rtol=4e-3, atol=1e-4)
    assert norm.largest_sum <= size


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(1, 8, dtype=torch.float16)
    assert ScaledNorm(HalfRMSNorm(8), "eps")(x).abs().max() == 0


def test_every_plain_norm_is_guarded_and_none_of_torch() -> None:
    assert guard_norms(tiny_model("llama")) == 2 * 2 + 1
    assert guard_norms(tiny_model("cohere")) == 2 * 3 + 1
    phi = tiny_model("phi")
    assert guard_norms(phi) == 0
    assert isinstance(phi.model.final_layernorm, nn.LayerNorm)
