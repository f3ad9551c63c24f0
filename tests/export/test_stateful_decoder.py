"""The module that is traced, run token by token, against the plain model on the whole text."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import CLASSIC, tiny_model
from upcycle.errors import ExportError
from upcycle.export.attention import register_qfold
from upcycle.export.decoder import DecoderShape, StatefulDecoder, causal_mask, decoder_shape
from upcycle.export.loading import IMPLEMENTATIONS
from upcycle.export.norms import guard_norms
from upcycle.export.rotary import tabulate_rotary

CONTEXT = 32


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", CLASSIC)
def test_decoding_through_the_states_gives_the_models_logits(family: str, attention: str) -> None:
    register_qfold()
    model = tiny_model(family, num_key_value_heads=2)
    tokens = torch.randint(0, 260, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
        model.set_attn_implementation(IMPLEMENTATIONS[attention])
        tabulate_rotary(model, CONTEXT)
        guard_norms(model)
        decoder = StatefulDecoder(model, decoder_shape(model), CONTEXT)
        logits = [
            decoder(
                tokens[:, step : step + 1].int(),
                torch.tensor([step], dtype=torch.int32),
                causal_mask(step, CONTEXT),
            )[0, 0]
            for step in range(tokens.shape[1])
        ]
    torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-3, atol=1e-4)


def test_shape_is_what_the_model_computes() -> None:
    shape = decoder_shape(tiny_model("gemma", num_key_value_heads=4))
    assert shape == DecoderShape(
        num_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        value_head_dim=16,
        num_linears=2 * 7 + 1,
    )


def test_layers_with_different_caches_are_refused() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 32, bias=False)
    attention.v_proj = torch.nn.Linear(64, 32, bias=False)
    attention.num_key_value_groups = 2
    with pytest.raises(ExportError, match="2 of 2 layers keep K and V, in 2 shapes"):
        decoder_shape(model)


def test_rotary_tables_hold_the_models_own_angles() -> None:
    model = tiny_model("phi")
    rotary = model.model.rotary_emb
    tabulate_rotary(model, CONTEXT)
    positions = torch.tensor([[0, 5, CONTEXT - 1]])
    for found, expected in zip(
        model.model.rotary_emb(torch.zeros(1), positions),
        rotary(torch.zeros(1), positions),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 4}, "no rotary position embedding"),
        ("olmo3", {}, "one rotary embedding per layer type"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic rotary frequencies change with the length beyond 16 positions",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 24,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
            },
            "longrope rotary frequencies change with the length beyond 24 positions",
        ),
    ],
)
def test_positions_that_no_table_can_hold_are_refused(
    model_type: str, settings: dict[str, Any], message: str
) -> None:
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **{**small, **settings})
    with pytest.raises(ExportError, match=message):
        tabulate_rotary(AutoModelForCausalLM.from_config(config), CONTEXT)
