"""Counts against loops over every element, and against what a real model does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import upcycle
from tests.kvcache.published import DEEPSEEK_V2
from upcycle.attention import AttentionShape, Rope, valid_kv_heads
from upcycle.errors import CheckpointError, PlanError, UpcycleError
from upcycle.families import shape_of
from upcycle.families.latent import Latent
from upcycle.kvcache.counting import (
    count_attention,
    kv_cache_bytes,
    kv_cache_elements,
    kv_projection_parameters,
    parameters_saved,
)
from upcycle.kvcache.layout import CacheLayout

small = st.integers(1, 4)


@st.composite
def shapes(draw: Callable[..., Any]) -> AttentionShape:
    kv_heads = draw(small)
    return AttentionShape(
        num_layers=draw(small),
        num_attention_heads=kv_heads * draw(small),
        num_key_value_heads=kv_heads,
        head_dim=draw(small),
        value_head_dim=draw(small),
        hidden_size=draw(small),
        rope=Rope("none", 0),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@given(shape=shapes(), length=st.integers(0, 5), batch=st.integers(0, 3), data=st.data())
def test_counts_are_those_of_loops(
    shape: AttentionShape, length: int, batch: int, data: st.DataObject
) -> None:
    choices = valid_kv_heads(shape.num_attention_heads, shape.num_key_value_heads)
    kv_heads = data.draw(st.sampled_from(choices))
    cached = projections = parameters = 0
    for _layer in range(shape.num_layers):
        for _kv_head in range(kv_heads):
            for _channel in range(shape.head_dim + shape.value_head_dim):
                parameters += shape.hidden_size + (1 if shape.qkv_bias else 0)
                projections += shape.hidden_size
                for _token in range(batch * length):
                    cached += 1
    assert kv_cache_elements(shape, kv_heads, length=length, batch=batch) == cached
    assert kv_projection_parameters(shape, kv_heads) == parameters
    counts = {each.kv_heads: each for each in count_attention(shape, length=1)}
    assert counts[kv_heads].projection_macs == projections


@given(shape=shapes())
def test_core_macs_do_not_depend_on_kv_heads_and_savings_do(shape: AttentionShape) -> None:
    choices = valid_kv_heads(shape.num_attention_heads, shape.num_key_value_heads)
    counts = count_attention(shape, length=7)
    assert [count.kv_heads for count in counts] == choices[::-1]
    assert len({count.core_macs for count in counts}) == 1
    for count in counts:
        assert count.projection_parameters == kv_projection_parameters(
            replace(shape, num_key_value_heads=count.kv_heads)
        )
    assert parameters_saved(shape, shape.num_key_value_heads) == 0


@given(shape=shapes(), window=st.none() | st.integers(1, 6), length=st.integers(1, 9), latent=small)
def test_bytes_and_intensities_are_those_of_loops(
    shape: AttentionShape, window: int | None, length: int, latent: int
) -> None:
    windows = (window,) * shape.num_layers
    compressed = Latent(latent, 2)
    wider = replace(shape, head_dim=shape.head_dim + 2, num_key_value_heads=1)
    layouts = CacheLayout(shape, windows), CacheLayout(wider, windows, compressed)
    for layout in layouts:
        for counts in count_attention(layout, length=length, bytes_per_element=4):
            is_latent = counts.kind == "MLA"
            dims, heads = layout.shape, layout.shape.num_attention_heads
            decoded = prefilled = decode_macs = prefill_macs = 0
            query, value = dims.head_dim, dims.value_head_dim
            if is_latent:
                entry = latent + 2
            else:
                assert counts.kv_heads is not None
                entry = counts.kv_heads * (query + value)
            absorbed = (latent + 2, latent) if is_latent else (query, value)
            for _layer in range(shape.num_layers):
                for token in range(length):
                    seen = [key for key in range(token + 1) if not window or token - key < window]
                    prefill_macs += heads * (query + value) * len(seen)
                    prefilled += heads * (query + value) + entry  # q in and o out, cache written
                    prefilled += 2 * heads * (query + value) if is_latent else entry
                decode_macs += heads * sum(absorbed) * len(seen)
                decoded += heads * sum(absorbed) + entry * (len(seen) + 1)
            assert (counts.core_macs, counts.decode_bytes) == (decode_macs, 4 * decoded)
            assert (counts.prefill_macs, counts.prefill_bytes) == (prefill_macs, 4 * prefilled)
            assert counts.decode_intensity == 2 * decode_macs / (4 * decoded)
            assert counts.prefill_intensity == 2 * prefill_macs / (4 * prefilled)


def test_intensity_of_a_long_decode_is_the_size_of_a_group() -> None:
    for counts in count_attention({**CONFIG, "num_key_value_heads": 8}, length=10**6):
        assert counts.kv_heads is not None
        assert counts.decode_intensity == pytest.approx(8 / counts.kv_heads, rel=1e-4)


def test_parameters_of_a_latent_are_those_of_the_real_projections() -> None:
    config = {**DEEPSEEK_V2, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4, "vocab_size": 16, "first_k_dense_replace": 2}
    config |= {"intermediate_size": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 4}
    config |= {"qk_nope_head_dim": 6, "v_head_dim": 10}
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**config))
    real = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "kv_" in name and "norm" not in name
    )
    latent, *_ = count_attention(config, length=8)
    assert latent.projection_parameters == latent.projection_macs == real


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_counts_are_those_of_a_real_forward_and_its_cache(kv_heads: int) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=6,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    shape = shape_of(config.to_dict())
    tokens = torch.zeros(3, 5, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values

    def macs(module: str, operation: Any) -> int:
        name = f"LlamaForCausalLM.model.layers.{{}}.self_attn{module}"
        counts = counter.get_flop_counts()
        return sum(counts[name.format(layer)][operation] for layer in range(2)) // 2

    counts = next(each for each in count_attention(shape, length=5) if each.kv_heads == kv_heads)
    # Eager attention saves nothing for the causal mask: 3 x 5 queries meet 5 keys each.
    assert macs("", torch.ops.aten.bmm) == 15 * counts.core_macs
    projections = macs(".k_proj", torch.ops.aten.mm) + macs(".v_proj", torch.ops.aten.mm)
    assert projections == 15 * counts.projection_macs
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cached == kv_cache_elements(shape, length=5, batch=3)
    stored = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "k_proj" in name or "v_proj" in name
    )
    assert stored == kv_projection_parameters(shape)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def test_bytes_of_a_config_its_file_its_folder_and_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = 2 * 3 * 4 * 8 * 10 * 2
    for source in (CONFIG, tmp_path / "config.json", str(tmp_path), shape_of(CONFIG)):
        assert upcycle.kv_cache_bytes(source, length=10) == expected


def test_head_dim_is_the_configured_one() -> None:
    assert kv_cache_bytes({**CONFIG, "head_dim": 16}) == 2 * kv_cache_bytes(CONFIG)


@pytest.mark.parametrize("kv_heads", [0, -1, 3, 16])
def test_an_impossible_number_of_kv_heads_is_refused_with_the_possible_ones(kv_heads: int) -> None:
    with pytest.raises(PlanError) as caught:
        kv_cache_bytes(CONFIG, kv_heads=kv_heads)
    assert caught.value.fix == "choose one of 1, 2, 4, 8"


@pytest.mark.parametrize("name", ["length", "batch", "bytes_per_element"])
def test_a_negative_count_is_refused(name: str) -> None:
    with pytest.raises(UpcycleError, match=f"{name} is negative"):
        kv_cache_bytes(CONFIG, **{name: -1})


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        kv_cache_bytes(tmp_path)
