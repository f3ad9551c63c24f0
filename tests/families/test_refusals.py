"""Every model type of transformers is a family, has a map onto one, or is refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.tiny import BASE, convert
from upcycle.errors import FamilyError
from upcycle.families import convertible, shape_of
from upcycle.families.latent import FAMILIES as FAMILIES_WITH_LATENT
from upcycle.families.refused import REFUSALS, refusal
from upcycle.families.retargets.rules import RETARGETS

TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
MODEL_TYPES = sorted(
    {name for task in TASKS for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
)
ANSWERED = {*convertible(), *RETARGETS}
# Loaded by code of their own, or older than the class that transformers has today.
NOT_IN_TRANSFORMERS = {"kimi_k2", "openelm", "rwkv5", "rwkv6", "rwkv7"}


def kind_of(config: dict[str, Any], *, supported: bool = False) -> str | None:
    found = refusal(config, supported=supported)
    return found and found.kind


def test_every_model_type_of_transformers_is_covered_or_refused() -> None:
    unexplained = [
        name
        for name in MODEL_TYPES
        if name not in ANSWERED
        and not refusal({"model_type": name})
        and not refusal(AutoConfig.for_model(name).to_dict())
    ]
    assert unexplained == []


def test_no_model_type_has_two_answers() -> None:
    refused = [name for found in REFUSALS for name in found.model_types]
    assert len(refused) == len(set(refused))
    assert not set(refused) & ANSWERED


def test_what_caches_a_latent_is_refused_by_name() -> None:
    (latent,) = [found for found in REFUSALS if "kv_lora_rank" in found.keys]
    assert {family.model_type for family in FAMILIES_WITH_LATENT} <= set(latent.model_types)


def test_refused_model_types_exist() -> None:
    for found in REFUSALS:
        unknown = set(found.model_types) - set(CONFIG_MAPPING_NAMES) - NOT_IN_TRANSFORMERS
        assert unknown == (set(found.model_types) if found.kind == "remote code" else set())


def test_kinds_are_many_and_each_says_why_and_what_to_do() -> None:
    assert len({found.kind for found in REFUSALS}) == len(REFUSALS) >= 12
    for found in REFUSALS:
        assert found.model_types or found.keys
        assert min(len(found.reason), len(found.way_out)) > 20, found.kind


@pytest.mark.parametrize("name", convertible())
def test_no_family_is_refused_by_its_own_default_configuration(name: str) -> None:
    assert refusal(AutoConfig.for_model(name).to_dict(), supported=True) is None


SEEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "latent": ({"kv_lora_rank": 512}, "multi-head latent attention", "kv_lora_rank is 512"),
    "encoder": ({"is_encoder_decoder": True}, "encoder-decoder", "is_encoder_decoder is True"),
    "falcon": (
        {"new_decoder_architecture": True}, "Falcon's new decoder", "new_decoder_architecture",
    ),
    "sharing": ({"num_kv_shared_layers": 15}, "KV heads shared between layers", "is 15"),
    "per layer": (
        {"per_layer_config": {"0": {"num_key_value_heads": 4}}},
        "attention that differs between layers",
        "per_layer_config is an object of 1 keys",
    ),
    "wrapper": (
        {"text_config": {"model_type": "qwen2"}}, "multimodal wrapper", "a 'qwen2' model",
    ),
    "long": (
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}] * 9},
        "attention that differs between layers",
        "...",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEEN)
@pytest.mark.parametrize("model_type", ["llama", "unheard_of"])
def test_a_key_that_tells_refuses_any_model_type(case: str, model_type: str) -> None:
    keys, kind, seen = SEEN[case]
    config = {"model_type": model_type, **keys}
    found = refusal(config, supported=model_type == "llama")
    assert found is not None
    assert found.kind == kind
    error = found.error(config)
    assert seen in error.where
    assert len(str(error).splitlines()) == 3
    with pytest.raises(FamilyError, match="cannot be converted"):
        shape_of(config)


@pytest.mark.parametrize(
    "keys", [{"kv_lora_rank": None}, {"is_encoder_decoder": False}, {"num_kv_shared_layers": 0}, {}]
)
def test_a_key_that_is_not_set_refuses_nothing(keys: dict[str, Any]) -> None:
    assert refusal({"model_type": "unheard_of", **keys}) is None


def test_a_refused_type_may_be_registered_as_a_family_elsewhere() -> None:
    assert kind_of({"model_type": "bloom"}) == "BLOOM"
    assert kind_of({"model_type": "bloom"}, supported=True) is None
    assert kind_of({"model_type": "falcon", "new_decoder_architecture": True}, supported=True)


def test_the_way_out_of_a_multimodal_wrapper_works(tmp_path: Path) -> None:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = LlavaConfig(text_config=LlamaConfig(**BASE), vision_config=vision, image_token_index=9)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "wrapper")
    with pytest.raises(FamilyError, match="wraps a text model") as caught:
        convert(tmp_path / "wrapper", tmp_path / "refused", kv_heads=2)
    assert "model.language_model" in caught.value.fix

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "wrapper")
    text = AutoModelForCausalLM.from_config(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    text.save_pretrained(tmp_path / "text")
    convert(tmp_path / "text", tmp_path / "out", kv_heads=8)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(converted(ids).logits, model(ids).logits)
