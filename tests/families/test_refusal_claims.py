"""What the refusals say of classes, held against transformers' own configurations and classes."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from upcycle.families.refused import REFUSALS, Refusal, refusal

KEY = "num_key_value_heads"
NO_CLAIM = ("no num_key_value_heads", "no KV heads:", "has no KV heads")
HAS_CLAIM = ("has num_key_value_heads", "num_key_value_heads in its config is not used")
# What names KV heads that are not the text decoder's own.
OTHER_PARTS = ("encoder", "audio", "vision", "codec")
# transformers has no such type: its checkpoints bring code of their own.
NOT_MADE = {"kimi_k2"}


def kv_keys(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Every key of the text decoder that counts KV heads, with the keys that lead to it."""
    for key, value in config.items():
        name = f"{path}{key}"
        if any(name.startswith(part) for part in OTHER_PARTS):
            continue
        if isinstance(value, Mapping):
            yield from kv_keys(value, f"{name}.")
        elif "key_value_heads" in str(key) or "kv_heads" in str(key):
            yield name


def claims(*phrases: str) -> list[tuple[str, Refusal]]:
    return [
        (model_type, found)
        for found in REFUSALS
        for model_type in found.model_types
        if any(phrase in found.reason for phrase in phrases) and model_type not in NOT_MADE
    ]


@pytest.mark.parametrize(("model_type", "found"), claims(*NO_CLAIM))
def test_a_class_that_is_said_to_have_no_kv_heads_has_none(model_type: str, found: Refusal) -> None:
    assert list(kv_keys(AutoConfig.for_model(model_type).to_dict())) == []


@pytest.mark.parametrize(("model_type", "found"), claims(*HAS_CLAIM))
def test_a_class_that_is_said_to_have_kv_heads_has_them(model_type: str, found: Refusal) -> None:
    keys = list(kv_keys(AutoConfig.for_model(model_type).to_dict()))
    assert any(key.rpartition(".")[2] == KEY for key in keys)


def test_both_claims_are_made_of_many() -> None:
    assert len(claims(*NO_CLAIM)) > 40
    assert len(claims(*HAS_CLAIM)) > 20


def test_every_encoder_decoder_with_kv_heads_is_told_as_such() -> None:
    """No sequence-to-sequence type is left to the claim that its class has none."""
    for model_type in CONFIG_MAPPING_NAMES:
        found = refusal({"model_type": model_type})
        if found is None or "encoder-decoder" not in found.kind:
            continue
        has = any(kv_keys(AutoConfig.for_model(model_type).to_dict()))
        assert has == (found.kind == "encoder-decoder with KV heads"), model_type


@pytest.mark.parametrize("model_type", ["t5gemma", "t5gemma2", "canary", "cohere_asr", "dia"])
def test_whole_configurations_get_the_words_of_their_type(model_type: str) -> None:
    """Their files say is_encoder_decoder, which tells less than the type."""
    config = AutoConfig.for_model(model_type).to_dict()
    assert config["is_encoder_decoder"] is True
    found = refusal(config)
    assert found is not None
    assert "has num_key_value_heads for the decoder" in found.reason


def test_nobody_is_sent_to_a_class_that_is_refused_itself() -> None:
    for found in REFUSALS:
        for other in ("T5Gemma", "Moonshine"):
            assert other.lower() not in found.way_out.lower()


@pytest.mark.parametrize(
    ("model_type", "grouped"),
    [
        (
            "moonshine",
            {
                "encoder_num_hidden_layers": 1,
                "decoder_num_hidden_layers": 1,
                "encoder_num_key_value_heads": 2,
                "decoder_num_key_value_heads": 2,
            },
        ),
        (
            "moonshine_streaming",
            {
                "num_hidden_layers": 1,
                "num_key_value_heads": 2,
                "encoder_config": {
                    "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64,
                },
            },
        ),
    ],
)  # fmt: skip
def test_moonshine_does_not_run_with_fewer_kv_heads(
    model_type: str, grouped: dict[str, Any]
) -> None:
    settings = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}
    config = AutoConfig.for_model(model_type, **settings, **grouped)
    model = AutoModelForSpeechSeq2Seq.from_config(config)
    with pytest.raises(RuntimeError, match=r"shape '\[1, \d+, 2, 8\]' is invalid"):
        model(torch.randn(1, 16000), decoder_input_ids=torch.tensor([[1, 2, 3]]))
    found = refusal({"model_type": model_type, "is_encoder_decoder": True})
    assert found is not None
    assert found.kind == "Moonshine"
