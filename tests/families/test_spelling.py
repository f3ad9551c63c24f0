"""Model types under older names are told with the class that they are, and what to rename."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.regress.folders import get_config, load, logits, set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import FamilyError
from upcycle.families import convertible, family_of
from upcycle.families.refused import REFUSALS
from upcycle.families.retargets.rules import RETARGETS
from upcycle.families.spelling import OLD_NAMES


def error_of(**config: object) -> FamilyError:
    with pytest.raises(FamilyError) as caught:
        family_of(config)
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


@pytest.mark.parametrize("name", OLD_NAMES)
def test_each_is_no_type_of_transformers_and_names_a_family(name: str) -> None:
    old = OLD_NAMES[name]
    assert name not in CONFIG_MAPPING_NAMES
    assert name not in [known for found in REFUSALS for known in found.model_types]
    assert old.native in convertible()
    assert old.renames or old.steps
    error = error_of(model_type=name)
    assert error.what.startswith(f"model_type {name!r} is transformers' {old.native} ")
    assert len(error.fix) < 400


@pytest.mark.parametrize("name", ["RefinedWebModel", "RefinedWeb"])
def test_the_first_falcons_are_told_their_keys(tmp_path: Path, name: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", "falcon")
    expected = logits(load(source))
    config = get_config(source)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    changes = {"model_type": name, "n_layer": layers, "n_head": heads}
    set_config(source, **changes, num_hidden_layers=None, num_attention_heads=None)
    with pytest.raises(FamilyError) as caught:
        convert(source, tmp_path / "out", kv_heads=8)
    assert caught.value.what == f"model_type '{name}' is transformers' falcon under an older name"
    assert caught.value.fix == (
        'set model_type to "falcon" in config.json, rename n_layer to num_hidden_layers, '
        "n_head to num_attention_heads"
    )
    # As told:
    text = json.dumps(get_config(source)).replace(name, "falcon")
    for old, new in (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")):
        text = text.replace(f'"{old}"', f'"{new}"')
    (source / "config.json").write_text(text)
    convert(source, tmp_path / "out", kv_heads=8)
    assert torch.equal(logits(load(tmp_path / "out")), expected)


def test_the_first_falcon_40b_is_refused_as_what_it_is() -> None:
    error = error_of(model_type="RefinedWeb", n_head=128, n_head_kv=8)
    assert "grouped already" in error.what
    assert "'RefinedWeb'" in error.what


def test_stablelm_epoch_is_stablelm(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "stablelm", qk_layernorm=False)
    expected = logits(load(source))
    config = get_config(source)
    old = {"model_type": "stablelm_epoch", "norm_eps": config["layer_norm_eps"], "rope_pct": 0.25}
    new = {"layer_norm_eps": None, "rope_parameters": None}
    set_config(source, **old, **new)
    assert error_of(**get_config(source)).fix == (
        'set model_type to "stablelm" in config.json, rename norm_eps to layer_norm_eps, '
        "rope_pct to partial_rotary_factor"
    )
    config = get_config(source)
    renamed = {OLD_NAMES["stablelm_epoch"].keys.get(key, key): v for key, v in config.items()}
    (source / "config.json").write_text(json.dumps({**renamed, "model_type": "stablelm"}))
    convert(source, tmp_path / "out", kv_heads=8)
    assert torch.equal(logits(load(tmp_path / "out")), expected)


def test_internlm_is_llama_with_biases(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "llama", attention_bias=True)
    set_config(source, model_type="internlm", bias=True, attention_bias=None)
    error = error_of(**get_config(source), auto_map={"AutoModel": "m.M"})
    assert error.fix == (
        'set model_type to "llama" in config.json, rename bias to attention_bias, remove auto_map'
    )


def test_orion_rotates_all_channels(tmp_path: Path) -> None:
    """StableLM rotates a quarter where config.json is silent."""
    source = tiny_checkpoint(
        tmp_path / "source", "stablelm", qk_layernorm=False, use_qkv_bias=False
    )
    config = {**get_config(source), "model_type": "orion", "rms_norm_eps": 1e-5}
    error = error_of(**config)
    assert "set partial_rotary_factor to 1.0" in error.fix
    assert "rename rms_norm_eps to layer_norm_eps" in error.fix


def test_minicpm_multiplies_as_granite_does() -> None:
    error = error_of(model_type="minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=256)
    assert "is transformers' granite" in error.what
    assert "rename scale_emb to embedding_multiplier" in error.fix
    assert "scale_depth / sqrt(num_hidden_layers)" in error.fix


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"model_type": "LLaMA"}, "llama"),
        ({"model_type": "qwen-2"}, "qwen2"),
        ({"model_type": "GPTNeoX"}, "gpt_neox"),
        ({"architectures": ["MixtralForCausalLM"]}, "mixtral"),
        ({"model_type": "mine", "architectures": ["GPT2LMHeadModel"]}, "gpt2"),
    ],
)
def test_a_misspelt_type_is_guessed(config: dict[str, object], meant: str) -> None:
    error = error_of(**config)
    assert error.fix.startswith(f'if it is {meant}, set model_type to "{meant}"; supported are ')


def test_an_unknown_type_lists_what_is_supported() -> None:
    error = error_of(model_type="entirely-different")
    names = error.fix.removeprefix("supported are ").split(", ")
    assert names == sorted([*convertible(), *RETARGETS])


def test_yi_has_other_names_of_its_norms() -> None:
    assert "rename ln1 to input_layernorm and ln2" in error_of(model_type="Yi").fix
