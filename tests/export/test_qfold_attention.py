"""Q-fold against transformers' own attention, which repeats K and V."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.tiny import tiny_model
from upcycle.errors import ExportError
from upcycle.models.qfold import (
    Segments,
    qfold_attention,
    register_attention_forms,
    repeated_attention,
)
from upcycle.options.attention_forms import FORMS


def repeated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    module: Any = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1], training=False, scaling=scaling
    )
    return eager_attention_forward(
        module, query, key, value, mask, scaling=scaling, softcap=softcap
    )[0]


@pytest.mark.parametrize("attention", [qfold_attention, repeated_attention])
@pytest.mark.parametrize("apart", [False, True])
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 4),
    members=st.integers(1, 5),
    queries=st.integers(1, 6),
    past=st.integers(1, 9),
    dims=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_attention_with_repeated_heads(
    attention: Callable[..., tuple[Tensor, None]],
    apart: bool,
    batch: int,
    groups: int,
    members: int,
    queries: int,
    past: int,
    dims: tuple[int, int],
    softcap: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    context = past + queries
    query = random(batch, groups * members, queries, dims[0])
    key, value = random(batch, groups, context, dims[0]), random(batch, groups, context, dims[1])
    mask = random(batch, 1, queries, context)
    mask += torch.full((queries, context), -4e4, dtype=torch.float64).triu(past + 1)
    keys, values = (Segments(x[:, :, :past], x[:, :, past:]) if apart else x for x in (key, value))
    output, weights = attention(
        nn.Module(), query, keys, values, mask, scaling=0.3, softcap=softcap
    )
    assert weights is None
    assert output.shape == (batch, queries, groups * members, dims[1])
    # transformers' softmax is in fp32
    torch.testing.assert_close(
        output, repeated(query, key, value, mask, 0.3, softcap), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("attention", [qfold_attention, repeated_attention])
def test_sinks_take_their_share_of_the_softmax(
    attention: Callable[..., tuple[Tensor, None]], queries: int
) -> None:
    query, key = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 5, 8)
    sinks, mask = torch.randn(6), torch.zeros(1, 1, queries, 5)
    module: Any = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)
    expected, _ = modeling_gpt_oss.eager_attention_forward(module, query, key, key, mask, 0.3)
    for keys in (key, Segments(key[:, :, :4], key[:, :, 4:])):
        output, _ = attention(nn.Module(), query, keys, keys, mask, scaling=0.3, s_aux=sinks)
        torch.testing.assert_close(output, expected)


def test_one_query_needs_no_mask() -> None:
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    output, _ = qfold_attention(nn.Module(), query, key, key, None, scaling=1.0)
    torch.testing.assert_close(output, repeated(query, key, key, None, 1.0, None))


def test_several_queries_without_a_mask_are_refused() -> None:
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ExportError, match="over 3 queries got no mask"):
        qfold_attention(nn.Module(), query, key, key, None, scaling=1.0)


@pytest.mark.parametrize("argument", [{"position_bias": torch.zeros(4)}, {"dropout": 0.1}])
def test_what_is_not_expressed_is_refused_by_name(argument: dict[str, Any]) -> None:
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ExportError, match=next(iter(argument))):
        qfold_attention(nn.Module(), query, key, key, None, scaling=1.0, **argument)


@pytest.mark.parametrize("attention", FORMS)
def test_a_plain_forward_is_causal(attention: str) -> None:
    """transformers builds the mask only because a mask function is registered too."""
    register_attention_forms()
    model = tiny_model("llama", num_key_value_heads=2)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation(attention)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
