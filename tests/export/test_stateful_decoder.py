"""The module that is traced, run call by call, against the plain model on the whole text."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import CLASSIC, tiny_model
from upcycle.errors import ExportError
from upcycle.export.decoder import decoder_shape
from upcycle.export.experts import use_dense_experts
from upcycle.export.layers import guard_norms, split_output_head, use_convolutions
from upcycle.export.masks import additive_mask, mask_windows
from upcycle.export.rotary import tabulate_rotary
from upcycle.export.stateful import StatefulDecoder
from upcycle.models.qfold import register_attention_forms
from upcycle.options.attention_forms import FORMS
from upcycle.program.noted import DecoderShape
from upcycle.program.signature import MASKED

CONTEXT = 32
TOKENS = torch.randint(0, 260, (1, 24), generator=torch.Generator().manual_seed(1))
HYBRID = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def decoder_of(model: Any, attention: str = "qfold") -> StatefulDecoder:
    register_attention_forms()
    model.set_attn_implementation(attention)
    use_dense_experts(model)
    tabulate_rotary(model, CONTEXT)
    guard_norms(model)
    return StatefulDecoder(model, decoder_shape(model, CONTEXT), CONTEXT).eval()


def run(decoder: StatefulDecoder, lengths: list[int]) -> Tensor:
    """Logits of the tokens, so many of them per call."""
    logits, start = [], 0
    for length in lengths:
        masks = [additive_mask(start, length, CONTEXT, w) for w in decoder.masks.values()]
        tokens = TOKENS[:, start : start + length].int()
        with torch.no_grad():
            logits.append(decoder(tokens, torch.tensor([start], dtype=torch.int32), *masks)[0])
        start += length
    return torch.cat(logits)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("family", CLASSIC)
def test_prefill_then_decoding_gives_the_models_logits(family: str, attention: str) -> None:
    model = tiny_model(family, num_key_value_heads=2)
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    found = run(decoder_of(model, attention), [8, 8, *[1] * 8])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "settings", "masks"),
    [
        ("mistral", {"sliding_window": 6}, {"slidingMask": 6}),
        ("gemma3_text", HYBRID, {"causalMask": None, "slidingMask": 6}),
        ("gpt_oss", HYBRID, {"causalMask": None, "slidingMask": 6}),
        ("olmo3", {**HYBRID, "sliding_window": CONTEXT}, {"causalMask": None}),
    ],
)
def test_windows_shorter_than_the_context_have_a_mask_of_their_own(
    family: str, settings: dict[str, Any], masks: dict[str, int | None]
) -> None:
    model = tiny_model(family, num_key_value_heads=2, **settings)
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    decoder = decoder_of(model)
    assert decoder.masks == masks
    torch.testing.assert_close(run(decoder, [16, *[1] * 8]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe"])
def test_dense_experts_are_the_chosen_ones(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(TOKENS).logits
        use_dense_experts(model)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@given(
    position=st.integers(0, 20),
    queries=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_a_mask_shows_the_last_tokens_up_to_ones_own(
    position: int, queries: int, window: int | None
) -> None:
    mask = additive_mask(position, queries, CONTEXT, window)
    assert mask.shape == (1, 1, queries, CONTEXT)
    for i in range(queries):
        own = position + i
        first = 0 if window is None else max(0, own - window + 1)
        visible = [first <= seen <= own for seen in range(CONTEXT)]
        assert mask[0, 0, i].tolist() == [0.0 if seen else MASKED for seen in visible]


def test_chunks_shorter_than_the_context_are_refused() -> None:
    model = tiny_model("llama")
    model.config.attention_chunk_size = 16
    with pytest.raises(ExportError, match="attends in chunks of 16 tokens"):
        mask_windows(model, CONTEXT)
    assert mask_windows(model, 16) == {"causalMask": None}


def test_shape_is_what_the_model_computes() -> None:
    shape = decoder_shape(tiny_model("gemma", num_key_value_heads=4), CONTEXT)
    assert shape == DecoderShape(
        num_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        value_head_dim=16,
        num_linears=2 * 7 + 1,
        masks={"causalMask": None},
    )


def test_layers_with_different_caches_are_refused() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 32, bias=False)
    attention.v_proj = torch.nn.Linear(64, 32, bias=False)
    attention.num_key_value_groups = 2
    with pytest.raises(ExportError, match="2 of 2 layers keep K and V, in 2 shapes"):
        decoder_shape(model, CONTEXT)


def test_positions_that_the_model_is_not_told_are_refused() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=64, n_layer=1, n_head=4, vocab_size=64)
    with pytest.raises(ExportError, match="BloomForCausalLM takes no position_ids"):
        decoder_shape(AutoModelForCausalLM.from_config(config), CONTEXT)


@pytest.mark.parametrize("family", ["phi", "gemma3_text"])
def test_rotary_tables_hold_the_models_own_angles(family: str) -> None:
    model = tiny_model(family, **(HYBRID if family == "gemma3_text" else {}))
    rotary = model.model.rotary_emb
    tabulate_rotary(model, CONTEXT)
    arguments: list[Any] = [torch.zeros(1), torch.tensor([[0, 5, CONTEXT - 1]])]
    for layer_type in HYBRID["layer_types"] if family == "gemma3_text" else [None]:
        own = [*arguments, layer_type] if layer_type else arguments
        for found, expected in zip(model.model.rotary_emb(*own), rotary(*own), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rope_parameters", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "dynamic rotary frequencies change with the length beyond 16 positions",
        ),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 8,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
            "longrope rotary frequencies change with the length beyond 8 positions",
        ),
    ],
)
def test_positions_that_no_table_can_hold_are_refused(
    rope_parameters: dict[str, Any], message: str
) -> None:
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=rope_parameters)
    with pytest.raises(ExportError, match=message):
        tabulate_rotary(model, CONTEXT)


@pytest.mark.parametrize("family", ["gemma", "phi", "phimoe"])
def test_other_forms_of_the_linear_layers_give_the_same_logits(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(TOKENS).logits
        split_output_head(model, 3)
        use_convolutions(model)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
