"""Every family reads its layout into the canonical form and back, and computes the same."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.tiny import FAMILIES, MULTI_QUERY, kv_settings, tiny_checkpoint, tiny_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError, FamilyError
from upcycle.families import FAMILIES as REGISTRY
from upcycle.families import Family, convertible, family_in, family_of, shape_of
from upcycle.families.class_config import class_defaults
from upcycle.heads.reference import attention_output
from upcycle.planning import plan

NAMES = sorted(FAMILIES)
RENAMED_WHEN_LOADED = dict.fromkeys(("exaone", "sarvam_moe"), "model.layers.{layer}.self_attn")


def registered(name: str) -> Family:
    family = REGISTRY.get(name)
    assert family is not None
    return family


def test_every_family_has_a_tiny_model() -> None:
    assert convertible() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_reading_and_writing_is_the_identity(tmp_path: Path, name: str) -> None:
    for kv_heads in (1, 8) if name in MULTI_QUERY else (2, 8):
        folder = tiny_checkpoint(tmp_path / str(kv_heads), name, **kv_settings(name, kv_heads))
        checkpoint = Checkpoint.open(folder)
        family = family_in(checkpoint)
        shape = family.shape(checkpoint.config)
        assert shape.num_key_value_heads == kv_heads
        plan(checkpoint, kv_heads=kv_heads)  # every attention tensor is known, and none is missing
        for layer in shape.attention_layers:
            names = family.tensor_names(layer, shape)
            tensors = {role: checkpoint.read(tensor) for role, tensor in names.items()}
            assert {r: tuple(t.shape) for r, t in tensors.items()} == family.tensor_shapes(shape)
            written = family.write(family.read(tensors, shape))
            assert written.keys() == tensors.keys()
            for role, tensor in tensors.items():
                assert torch.equal(written[role], tensor), role


def rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    if "rope_theta" not in parameters:  # one entry for each kind of layer
        parameters = parameters[config.layer_types[0]]
    return float(parameters["rope_theta"])


@pytest.mark.parametrize("name", NAMES)
def test_the_canonical_form_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """The attention of a running model, from the input that it really gets."""
    model = tiny_model(name, **kv_settings(name, 1 if name in MULTI_QUERY else 2))
    model.set_attn_implementation("eager")
    config = model.config.to_dict()
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    family, shape = family_of(config), shape_of(config)
    layer = shape.attention_layers[0]
    names = family.tensor_names(layer, shape)
    weights = family.read({role: checkpoint.read(name) for role, name in names.items()}, shape)
    seen: dict[str, torch.Tensor] = {}

    def capture(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = next(iter(inspect.signature(module.forward).parameters))
        seen["x"] = args[0] if args else kwargs[first]
        seen["y"] = output[0]

    path = RENAMED_WHEN_LOADED.get(name, family.attention_module).format(layer=layer)
    handle = model.get_submodule(path).register_forward_hook(capture, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(12)[None] * 7, use_cache=False)
    handle.remove()
    found = attention_output(weights, seen["x"][0].double(), theta=rope_theta(model.config))
    torch.testing.assert_close(found.float(), seen["y"][0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A bare configuration, and one in which only the sizes are given."""
    ours = registered(name)
    twice = 2 * ours.setting({}, "hidden_size")
    for given in ({}, {ours.aliases.get("hidden_size", "hidden_size"): twice}):
        listed = {"layer_types": None, "full_attn_idxs": [0]}
        hybrid = ours.attention_layers is not None
        raw = {"model_type": name, **given, **(listed if hybrid else {})}
        theirs = AutoConfig.for_model(name, **given)
        for key, value in class_defaults(name).items():
            if {key, ours.aliases.get(key)} & {*given, "sliding_window"}:
                continue  # a window goes where its switch is off: see the tests of what is cached
            found = getattr(theirs, key, None)
            if key == "partial_rotary_factor":
                found = theirs.rope_parameters[key]
            assert found == value, key
        if hybrid and name == "granitemoehybrid":
            raw["layer_types"] = [*theirs.layer_types[:-1], "full_attention"]
        shape = shape_of(raw)
        kv_heads = getattr(theirs, "num_key_value_heads", None) or shape.num_attention_heads
        if name == "falcon":
            kv_heads = 1  # its class derives it from multi_query
        assert shape.num_key_value_heads == kv_heads
        assert shape.head_dim == (
            getattr(theirs, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        )


@pytest.mark.parametrize("name", NAMES)
def test_biases_and_norms_come_and_go_with_their_keys(tmp_path: Path, name: str) -> None:
    """Every flag that a family reads, both ways, against what the class saves."""
    family = registered(name)
    flags = {family.qkv_bias, family.output_bias}
    if family.qk_norm is not None:
        flags.add(family.qk_norm.when or False)
    for flag in sorted(flag for flag in flags if isinstance(flag, str)):
        for value in (True, False):
            settings = {flag: value, "mlp_bias": value}  # InternLM3 wants both alike
            folder = tiny_checkpoint(tmp_path / f"{flag}-{value}", name, **settings)
            kv_heads = shape_of(Checkpoint.open(folder).config).num_key_value_heads
            plan(folder, kv_heads=kv_heads)  # no attention tensor is missing or unknown


def test_null_kv_heads_mean_as_many_as_query_heads() -> None:
    assert (
        shape_of({"model_type": "mistral", "num_key_value_heads": None}).num_key_value_heads == 32
    )
    assert shape_of({"model_type": "mistral"}).num_key_value_heads == 8


def test_rotary_dim_is_found_in_old_and_new_places() -> None:
    old = {"model_type": "phi", "hidden_size": 64, "num_attention_heads": 4}
    assert shape_of(old).rope.rotary_dim == 8
    assert shape_of({**old, "partial_rotary_factor": 0.25}).rope.rotary_dim == 4
    new = {**old, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}
    assert shape_of(new).rope.rotary_dim == 16


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 7, "num_key_value_heads": 2, "hidden_size": 56},
        {"num_key_value_heads": [8, 4]},
        {"num_key_value_heads": 0},
        {"hidden_size": "64"},
        {"num_attention_heads": True},
    ],
)
def test_numbers_that_make_no_sense_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(FamilyError):
        shape_of({"model_type": "llama", **config})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "jamba"}, (4, 12, 20, 28)),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8}, (3, 7)),
        ({"model_type": "lfm2", "full_attn_idxs": [18, 9]}, (9, 18)),
        (
            {
                "model_type": "lfm2",
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
            },
            (1,),
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "num_hidden_layers": 2,
                "layers_block_type": ["attention", "mamba"],
            },
            (0,),
        ),
    ],
)
def test_a_hybrid_knows_its_attention_layers(
    config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    shape = shape_of(config)
    assert shape.attention_layers == layers
    assert shape.num_layers == len(layers)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "lfm2"},
        {"model_type": "lfm2", "full_attn_idxs": [99]},
        {"model_type": "lfm2", "layer_types": ["full_attention"]},
        {"model_type": "lfm2", "layer_types": "full"},
        {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "conv"]},
    ],
)
def test_a_hybrid_that_does_not_say_which_layers_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(FamilyError, match="layer"):
        shape_of(config)


def test_attention_in_a_layer_that_should_have_none_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "jamba", attn_layer_period=1, attn_layer_offset=0)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"attn_layer_period": 1', '"attn_layer_period": 2')
    )
    with pytest.raises(CheckpointError, match="layer 1 has no attention, but there is"):
        plan(folder, kv_heads=2)


def test_a_checkpoint_of_the_bare_model_has_no_prefix(tmp_path: Path) -> None:
    tiny_model("llama").model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert "layers.0.self_attn.k_proj.weight" in checkpoint.tensors
    assert family_in(checkpoint).attention_module == "layers.{layer}.self_attn"
    assert len(plan(checkpoint, kv_heads=2).operations) == len(checkpoint.tensors)


def test_classes_with_one_kv_head_or_all_offer_no_other() -> None:
    shape = shape_of({"model_type": "gpt_bigcode", "n_head": 8, "multi_query": False})
    assert shape.valid_kv_heads == [1, 8]
