"""Figures that others published, met exactly or to the digits that they print."""

import pytest

from tests.kvcache.published import DEEPSEEK_V2, EXAONE_4_1B, LLAMA_3_70B
from upcycle.attention import AttentionShape, Rope
from upcycle.kvcache.cache_dtype import cache_dtype
from upcycle.kvcache.capacity import Fit, fit_requests
from upcycle.kvcache.counting import (
    count_attention,
    kv_cache_bytes,
    kv_cache_elements,
    kv_projection_parameters,
    latent_reference,
)
from upcycle.kvcache.deployment import Deployment
from upcycle.kvcache.layout import cache_layout
from upcycle.kvcache.weights import Weights

GB = 10**9
MIB = 2**20
GIB = 2**30


def shape(heads: int, kv_heads: int, head_dim: int, layers: int, hidden: int) -> AttentionShape:
    return AttentionShape(
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        hidden_size=hidden,
        rope=Rope("half", head_dim),
        qkv_bias=False,
        output_bias=False,
    )


LLAMA_3_70B_SHAPE = shape(64, 8, 128, 80, 8192)
# Touvron et al. 2023, "Llama 2": 6,738,415,616 parameters are in the published 7B checkpoint.
LLAMA_2_7B = shape(32, 32, 128, 32, 4096)
LLAMA_2_7B_PARAMETERS = 6_738_415_616


def by_kv_heads(fits: tuple[Fit, ...]) -> dict[int, Fit]:
    return {fit.kv_heads: fit for fit in fits}


def test_llama_3_70b_bytes_per_token_and_per_request() -> None:
    assert kv_cache_bytes(LLAMA_3_70B) == 327_680
    assert kv_cache_bytes(LLAMA_3_70B, length=8192) / GB == pytest.approx(2.7, abs=0.05)
    assert kv_cache_bytes(LLAMA_3_70B, length=8192, batch=32) / GB == pytest.approx(86, abs=0.5)
    assert kv_cache_bytes(LLAMA_3_70B, length=128 * 1024) / GB == pytest.approx(43, abs=0.5)


def test_llama_3_70b_as_mha_and_as_mqa() -> None:
    mha = kv_cache_bytes(LLAMA_3_70B, kv_heads=64)
    assert mha / 1e6 == pytest.approx(2.6, abs=0.05)
    assert mha * 8192 / GB == pytest.approx(21.5, abs=0.05)
    assert mha * 8192 * 32 / GB == pytest.approx(690, abs=5)
    mqa = kv_cache_bytes(LLAMA_3_70B, kv_heads=1, length=8192)
    assert mqa / GB == pytest.approx(0.34, abs=0.005)


def test_gqa_8_in_fp8_is_a_sixteenth_of_mha_in_bf16() -> None:
    gqa = kv_cache_bytes(LLAMA_3_70B, bytes_per_element=1)
    assert gqa * 16 == kv_cache_bytes(LLAMA_3_70B, kv_heads=64, bytes_per_element=2)


def test_llama_3_70b_requests_on_four_gpus() -> None:
    # The published sum takes the four GPUs as one pool; splitting the model must give the same.
    pooled = Deployment(gpu_memory=320 * GB, context=8192, reserve=20 * GB)
    split = Deployment(gpu_memory=80 * GB, context=8192, gpus=4, reserve=20 * GB)
    for deployment in (pooled, split):
        fits = by_kv_heads(fit_requests(LLAMA_3_70B_SHAPE, Weights(140 * GB), deployment, batch=32))
        assert fits[8].requests == 59
        assert fits[64].requests == 7
        assert fits[64].decode_step_bytes / GB == pytest.approx(830, abs=5)
        assert fits[8].decode_step_bytes / GB == pytest.approx(226, abs=0.5)


def test_deepseek_v2_elements_per_token_and_layer() -> None:
    # DeepSeek-AI 2024, "DeepSeek-V2", table 1 counts 128 heads of 128.
    one_layer = shape(128, 128, 128, 1, 5120)
    assert kv_cache_elements(one_layer) == 32_768
    assert kv_cache_elements(one_layer, 8) == 2_048
    assert kv_cache_elements(DEEPSEEK_V2) == 60 * 576
    layout = cache_layout(DEEPSEEK_V2)
    assert layout.latent is not None
    assert layout.latent.groups(layout.shape) == 2.25


def test_key_and_value_head_dims_may_differ() -> None:
    # DeepSeek-V2's own config: keys of 128 + 64, values of 128.
    assert kv_cache_elements(DEEPSEEK_V2, 128) == 60 * 40_960


def test_the_latent_for_comparison_is_that_of_deepseek_v2() -> None:
    reference = latent_reference(cache_layout(shape(128, 128, 128, 60, 5120)))
    latent, published = (
        count_attention(layout, length=4096)[0] for layout in (reference, DEEPSEEK_V2)
    )
    assert latent == published
    assert (latent.kind, latent.elements_per_token_and_layer) == ("MLA", 576)


def test_exaone_4_1b_cache() -> None:
    # EXAONE 4.0 1.2B in fp16, context 4096.
    mha = kv_cache_bytes(EXAONE_4_1B, kv_heads=32, length=4096)
    assert kv_cache_bytes(EXAONE_4_1B, length=4096) == 240 * MIB
    assert kv_cache_bytes(EXAONE_4_1B, length=4096) // 60 == 4 * MIB
    assert kv_cache_bytes(EXAONE_4_1B) == 60 * 2**10
    assert mha == 60 * 16 * MIB == 960 * MIB  # what repeat-kv writes, and reads again


def test_llama_2_7b_gains_more_than_the_cache_ratio_on_a_small_gpu() -> None:
    weights = Weights(LLAMA_2_7B_PARAMETERS * 2, kv_bytes_per_element=2)
    small = Deployment(gpu_memory=24 * GIB, context=4096, reserve=GIB, utilization=0.9)
    fits = by_kv_heads(fit_requests(LLAMA_2_7B, weights, small))
    assert fits[32].concurrency == pytest.approx(4.0, abs=0.05)
    assert fits[8].concurrency == pytest.approx(19.1, abs=0.05)
    assert fits[8].kv_bytes_per_token * 4 == fits[32].kv_bytes_per_token
    large = Deployment(gpu_memory=80 * GIB, context=4096, reserve=GIB, utilization=0.9)
    fits = by_kv_heads(fit_requests(LLAMA_2_7B, weights, large))
    assert [round(fits[g].concurrency, 1) for g in (32, 8, 4)] == [29.2, 119.9, 240.8]


def test_llama_2_7b_parameters_by_kv_heads() -> None:
    now = kv_projection_parameters(LLAMA_2_7B)
    for kv_heads, billions in ((8, 5.93), (4, 5.80), (1, 5.70)):
        removed = now - kv_projection_parameters(LLAMA_2_7B, kv_heads)
        assert (LLAMA_2_7B_PARAMETERS - removed) / 1e9 == pytest.approx(billions, abs=0.005)


def test_llama_2_7b_stores_as_much_with_4_heads_on_8_gpus_as_with_8() -> None:
    deployment = Deployment(gpu_memory=80 * GIB, context=4096, gpus=8)
    fits = by_kv_heads(fit_requests(LLAMA_2_7B, Weights(2 * LLAMA_2_7B_PARAMETERS), deployment))
    assert fits[4].kv_bytes_per_token == fits[8].kv_bytes_per_token == 131_072
    assert fits[4].warning is not None
    assert fits[8].warning is None


def test_scales_of_an_integer_cache() -> None:
    # vLLM's int8 per-token-head cache, Llama-2-7B with 8 KV heads.
    per_head = cache_dtype("int8").bytes_per_head(cache_layout(LLAMA_2_7B).entry(8))
    assert 32 * 8 * per_head == 67_584
