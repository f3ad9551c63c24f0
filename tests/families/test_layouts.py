"""Every family reads its layout into the canonical form and back, and computes the same."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.tiny import FAMILIES, tiny_checkpoint, tiny_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import FamilyError
from upcycle.families import FAMILIES as REGISTRY
from upcycle.families import family_of, shape_of
from upcycle.heads.reference import attention_output

NAMES = sorted(FAMILIES)


def test_every_family_has_a_tiny_model() -> None:
    assert REGISTRY.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_reading_and_writing_is_the_identity(tmp_path: Path, name: str, kv_heads: int) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, name, num_key_value_heads=kv_heads))
    family = family_of(checkpoint.config)
    shape = family.shape(checkpoint.config)
    assert shape.num_key_value_heads == kv_heads
    for layer in range(shape.num_layers):
        names = family.tensor_names(layer, shape)
        tensors = {role: checkpoint.read(tensor) for role, tensor in names.items()}
        assert {r: tuple(t.shape) for r, t in tensors.items()} == family.tensor_shapes(shape)
        written = family.write(family.read(tensors, shape))
        assert written.keys() == tensors.keys()
        for role, tensor in tensors.items():
            assert torch.equal(written[role], tensor), role


@pytest.mark.parametrize("name", NAMES)
def test_the_canonical_form_computes_what_transformers_computes(name: str) -> None:
    model = tiny_model(name, num_key_value_heads=2).double()
    config = model.config.to_dict()
    family = family_of(config)
    shape = family.shape(config)
    state = model.state_dict()
    names = family.tensor_names(0, shape)
    weights = family.read({role: state[tensor] for role, tensor in names.items()}, shape)

    x = torch.randn(1, 12, shape.hidden_size, dtype=torch.float64)
    inner = model.model
    positions = inner.rotary_emb(x, torch.arange(12)[None])
    mask = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    attention = inner.layers[0].self_attn
    model.set_attn_implementation("eager")
    expected = attention(x, position_embeddings=positions, attention_mask=mask)[0][0]
    # transformers computes the rotary tables in fp32, ours are fp64
    torch.testing.assert_close(attention_output(weights, x[0]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    ours = REGISTRY.get(name)
    assert ours is not None
    theirs = AutoConfig.for_model(name)
    for key, value in ours.defaults.items():
        found = getattr(theirs, key, theirs.rope_parameters.get(key))
        assert found == value, key
    shape = shape_of({"model_type": name})
    assert shape.num_key_value_heads == theirs.num_key_value_heads
    assert (
        shape.head_dim == getattr(theirs, "head_dim", None)
        or shape.head_dim * shape.num_attention_heads == shape.hidden_size
    )


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


@pytest.mark.parametrize("model_type", ["bert", "t5", "mamba", None])
def test_an_unknown_family_is_refused_with_the_list(model_type: str | None) -> None:
    with pytest.raises(FamilyError, match="is not supported") as caught:
        family_of({"model_type": model_type})
    assert "gemma, llama, mistral, phi, qwen2" in caught.value.fix


def test_a_quantised_checkpoint_is_refused() -> None:
    with pytest.raises(FamilyError, match="quantised \\(gptq\\)"):
        family_of({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})


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


def test_phi_with_qk_layernorm_is_refused() -> None:
    with pytest.raises(FamilyError, match="qk_layernorm"):
        shape_of({"model_type": "phi", "qk_layernorm": True})
