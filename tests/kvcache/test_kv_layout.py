"""What layers cache, against transformers' own cache objects and against loops."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache

from tests.tiny import BASE, FAMILIES, tiny_model
from upcycle.attention import AttentionShape, Rope
from upcycle.errors import FamilyError
from upcycle.families import FAMILIES as REGISTRY
from upcycle.families import Family, convertible, family_of
from upcycle.families.latent import latent_attention
from upcycle.kvcache.counting import kv_cache_elements
from upcycle.kvcache.layout import CacheLayout, cache_layout

ON = {
    "num_hidden_layers": 12,
    "sliding_window": 7,
    "attention_chunk_size": 7,
    "use_sliding_window": True,
    "max_window_layers": 3,
}


def registered(name: str) -> Family:
    family = REGISTRY.get(name)
    assert family is not None
    return family


WINDOWED = {name for name in convertible() if registered(name).windows is not None}
HYBRIDS = {name for name in convertible() if registered(name).states is not None}
LATENT = sorted(set(REGISTRY.names()) - set(convertible()))


def windows_of_transformers(config: Any) -> tuple[int | None, ...]:
    """Of the layers that cache keys and values."""
    layers = [each for each in DynamicCache(config=config).layers if hasattr(each, "is_sliding")]
    return tuple(layer.sliding_window if layer.is_sliding else None for layer in layers)


@pytest.mark.parametrize("overrides", [{}, {**ON, "layer_types": None}], ids=["plain", "windows"])
@pytest.mark.parametrize("model_type", sorted(set(convertible()) - HYBRIDS))
def test_windows_are_those_of_the_class(model_type: str, overrides: dict[str, Any]) -> None:
    known = set(overrides)
    if model_type not in WINDOWED:  # what a class does not declare means nothing to it
        known &= {field.name for field in fields(CONFIG_MAPPING[model_type])}
    settings = {**BASE, **FAMILIES[model_type], **{key: overrides[key] for key in known}}
    config = AutoConfig.for_model(model_type, **settings)
    expected = windows_of_transformers(config)
    assert cache_layout({**settings, "model_type": model_type}).windows == expected
    assert cache_layout(config.to_dict()).windows == expected


def test_most_classes_are_seen_with_a_window() -> None:
    """The test above can fail: windows do occur in it."""
    found = {
        model_type
        for model_type in set(convertible()) - HYBRIDS
        if any(
            cache_layout(
                {**BASE, **FAMILIES[model_type], **ON, "layer_types": None}
                | {"model_type": model_type}
            ).windows
        )
    }
    assert found == WINDOWED - {"mellum"}


@pytest.mark.parametrize("model_type", ["gemma2", "mistral", "olmo3"])
@pytest.mark.parametrize("length", [3, 4, 5, 13])
def test_elements_are_those_of_a_real_cache_with_windows(model_type: str, length: int) -> None:
    model = tiny_model(model_type, sliding_window=5, num_hidden_layers=4)
    with torch.no_grad():
        cache = model(torch.arange(length)[None], use_cache=True).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kv_cache_elements(model.config.to_dict(), length=length) == cached


@pytest.mark.parametrize("model_type", convertible())
def test_states_and_elements_are_those_of_a_real_cache(model_type: str) -> None:
    model = tiny_model(model_type)
    with torch.no_grad():
        cache = model(torch.arange(9)[None] + 3, use_cache=True).past_key_values
    states = [
        state
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    ]
    cached = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    layout = cache_layout(model.config.to_dict())
    assert layout.state_elements == sum(state.numel() for state in states)
    assert (layout.state_elements > 0) == (model_type in HYBRIDS)
    elements = sum(tensor.numel() for tensor in cached if tensor is not None)
    assert kv_cache_elements(layout, length=9) == elements


@pytest.mark.parametrize("model_type", LATENT)
def test_a_latent_has_the_channels_that_the_class_says(model_type: str) -> None:
    # Kimi K2 comes with code of its own, with the configuration of DeepSeek-V3.
    theirs = AutoConfig.for_model("deepseek_v3" if model_type == "kimi_k2" else model_type)
    config = {**theirs.to_dict(), "model_type": model_type}
    shape, latent = latent_attention(config)
    layout = cache_layout(config)
    assert (layout.shape, layout.latent) == (shape, latent)
    assert layout.now.elements == theirs.kv_lora_rank + theirs.qk_rope_head_dim
    assert shape.head_dim == theirs.qk_nope_head_dim + theirs.qk_rope_head_dim
    assert shape.value_head_dim == theirs.v_head_dim
    assert layout.windows == (None,) * theirs.num_hidden_layers
    with pytest.raises(FamilyError, match="MLA caches one compressed latent"):
        family_of(config)


def layout_with(windows: list[int | None]) -> CacheLayout:
    shape = AttentionShape(len(windows), 4, 2, 8, 8, 32, Rope("half", 8), False, False)
    return CacheLayout(shape, tuple(windows))


def keys_seen(window: int | None, length: int) -> list[range]:
    """The keys that each query meets."""
    return [
        range(0 if window is None else max(0, query - window + 1), query + 1)
        for query in range(length)
    ]


@given(windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=3), data=st.data())
def test_counts_of_tokens_are_those_of_loops(
    windows: list[int | None], data: st.DataObject
) -> None:
    layout, length = layout_with(windows), data.draw(st.integers(1, 40))
    seen = [keys_seen(window, length) for window in windows]
    assert layout.attended_keys(length) == sum(len(queries[-1]) for queries in seen)
    assert layout.causal_pairs(length) == sum(len(keys) for queries in seen for keys in queries)
    # What the next token meets, itself not among it, must be cached.
    following = [keys_seen(window, length + 1)[-1] for window in windows]
    assert layout.cached_tokens(length) == sum(len(keys) - 1 for keys in following)


@given(
    window=st.none() | st.integers(1, 20),
    length=st.integers(1, 60),
    block=st.integers(1, 9),
    step=st.integers(1, 30),
)
def test_blocks_are_those_that_a_step_of_prefill_touches(
    window: int | None, length: int, block: int, step: int
) -> None:
    """Hold what the window still needs and what the step computes, at every offset of a step."""
    touched = 0
    for first in range(length):
        begin = 0 if window is None else max(0, first - (window - 1))
        held = range(begin, min(first + step, length))
        touched = max(touched, len({token // block for token in held}))
    counted = layout_with([window]).reserved_blocks(length, block, step)
    if window is None:
        assert counted == touched
    else:  # vLLM adds a block whether or not the window begins inside one
        assert touched <= counted <= touched + 1


@given(
    chunk=st.integers(1, 20),
    length=st.integers(1, 60),
    blocks=st.integers(1, 4),
    step=st.integers(1, 30),
)
def test_blocks_of_chunks_hold_a_chunk_and_a_step(
    chunk: int, length: int, blocks: int, step: int
) -> None:
    block = chunk
    layout = replace(layout_with([chunk * blocks, None]), chunked=True)
    touched = 0
    for first in range(length):
        begin = first // (chunk * blocks) * chunk * blocks  # what the step's first token attends to
        held = range(begin, min(first + step, length))
        touched = max(touched, len({token // block for token in held}))
    whole = -(-length // block)
    assert touched <= layout.reserved_blocks(length, block, step) - whole <= whole


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "gemma2", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "falcon_h1", "mamba_d_state": -1}, "mamba_d_state"),
        ({"model_type": "deepseek_v2"}, "hidden_size"),
        (
            {"model_type": "deepseek_v2", "hidden_size": 64, "num_hidden_layers": 2}
            | {"num_attention_heads": 4},
            "kv_lora_rank",
        ),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused_with_its_key(
    config: dict[str, Any], key: str
) -> None:
    with pytest.raises(FamilyError, match=rf"^{key} is ") as caught:
        cache_layout(config)
    assert key in caught.value.where
