"""Every retarget computes what its source computes, and refuses what it cannot express."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.families.retarget_sources import (
    BASE,
    SOURCES,
    rewrite,
    source_checkpoint,
    source_model,
    view_of,
)
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError, PlanError
from upcycle.families.retargets.rules import RETARGETS, target_config
from upcycle.families.retargets.view import RetargetedCheckpoint, on_disk, retargeted
from upcycle.models.loading import load_model, model_of

LENGTH = 40


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(260, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def built(view: RetargetedCheckpoint) -> Any:
    return model_of(view.config, {name: view.read(name).double() for name in view.tensors})


@pytest.mark.parametrize("name", SOURCES)
def test_logits_are_the_sources(
    tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    view = view_of(source_checkpoint(tmp_path, name))
    model = built(view)
    assert model.config.model_type == view.config["model_type"] == SOURCES[name][2]
    assert type(model).__name__ == view.config["architectures"][0]
    difference = relative(logits(model), logits(source_model(name)))
    record_property("retargeted", difference)
    assert difference <= 1e-10
    assert {tensor.dtype for tensor in view.tensors.values()} == {"F64"}
    assert set(view.tensors) == set(view.made)


@pytest.mark.parametrize("name", ["pythia", "neox, sequential", "gptj", "codegen", "gpt2", "opt"])
def test_a_wrong_head_would_be_seen(tmp_path: Path, name: str) -> None:
    """The tiny models are no place for a bug to hide: swapping two query heads shows."""
    view = view_of(source_checkpoint(tmp_path, name))
    tensors = {name: view.read(name) for name in view.tensors}
    ends = ("1.self_attn.q_proj.weight", "1.attn.c_attn.weight")
    query = next(tensor for tensor in tensors if tensor.endswith(ends))
    tensors[query] = tensors[query].reshape(4, -1, 48).flip(0).reshape(-1, 48)
    assert relative(logits(model_of(view.config, tensors)), logits(source_model(name))) > 1e-3


@pytest.mark.parametrize(
    ("name", "stored"),
    [("pythia", "F32"), ("neox, sequential", "F16"), ("gptj", "F16"), ("opt", "F16")],
)
def test_halves_stay_halves_unless_numbers_are_computed(
    tmp_path: Path, name: str, stored: str
) -> None:
    folder = source_checkpoint(tmp_path, name, dtype=torch.float16)
    view = view_of(folder)
    assert {tensor.dtype for tensor in view.tensors.values()} == {stored}
    assert view.config["dtype"] == {"F16": "float16", "F32": "float32"}[stored]
    expected = logits(load_model(folder, dtype=torch.float64))
    assert relative(logits(built(view)), expected) <= (1e-6 if stored == "F32" else 1e-10)


def test_a_dtype_can_be_asked_for(tmp_path: Path) -> None:
    folder = source_checkpoint(tmp_path, "pythia", dtype=torch.float16)
    view = view_of(folder, "bfloat16")
    assert {tensor.dtype for tensor in view.tensors.values()} == {"BF16"}
    assert view.config["dtype"] == "bfloat16"
    expected = logits(load_model(folder, dtype=torch.float64))
    assert relative(logits(built(view)), expected) <= 0.03
    with pytest.raises(PlanError, match="int8"):
        view_of(folder, "int8")


def test_numbers_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    folder = source_checkpoint(tmp_path, "pythia", dtype=torch.float32)
    rewrite(folder, lambda t: t["gpt_neox.layers.1.input_layernorm.weight"].fill_(1e6))
    view = view_of(folder, "float16")
    view.read("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match="float16 cannot hold"):
        view.read("model.layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_names_without_the_base_prefix(tmp_path: Path, name: str, prefix: str) -> None:
    folder = source_checkpoint(tmp_path, name)

    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    rewrite(folder, bare)
    assert relative(logits(built(view_of(folder))), logits(source_model(name))) <= 1e-10


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("pythia", ["attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"]),
        ("gptj", ["attn.bias", "attn.masked_bias"]),
        ("codegen", ["attn.causal_mask"]),
        ("gpt2", ["attn.bias", "attn.masked_bias"]),
    ],
)
def test_stored_buffers_are_dropped(tmp_path: Path, name: str, buffers: list[str]) -> None:
    folder = source_checkpoint(tmp_path, name)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    layers = "gpt_neox.layers" if name == "pythia" else "transformer.h"
    names = [f"{layers}.{layer}.{buffer}" for buffer in buffers for layer in range(3)]
    rewrite(folder, lambda tensors: tensors.update({name: mask.clone() for name in names}))
    assert relative(logits(built(view_of(folder))), logits(source_model(name))) <= 1e-10


def test_a_stored_head_that_is_tied_goes_along(tmp_path: Path) -> None:
    folder = source_checkpoint(tmp_path, "opt")
    table = "model.decoder.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table].clone()}))
    view = view_of(folder)
    assert "lm_head.weight" in view.tensors
    assert relative(logits(built(view)), logits(source_model("opt"))) <= 1e-10


@pytest.mark.parametrize("base", [500, 10000])
def test_a_configuration_from_before_transformers_5(tmp_path: Path, base: int) -> None:
    folder = source_checkpoint(tmp_path, "pythia, another base")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"], config["attention_bias"]
    legacy = {"rotary_pct": 0.5, "rotary_emb_base": base, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**config, **legacy}))
    view = view_of(folder)
    difference = relative(logits(built(view)), logits(source_model("pythia, another base")))
    assert difference <= 1e-10 if base == 500 else difference > 1e-3


def test_other_spellings_of_the_keys(tmp_path: Path) -> None:
    folder = source_checkpoint(tmp_path, "gpt2")
    config = json.loads((folder / "config.json").read_text())
    for ours, theirs in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head")):
        config[ours] = config.pop(theirs)
    (folder / "config.json").write_text(json.dumps(config))
    assert relative(logits(built(view_of(folder))), logits(source_model("gpt2"))) <= 1e-10


def test_tensors_stay_in_the_file_of_their_source(tmp_path: Path) -> None:
    view = view_of(source_checkpoint(tmp_path, "pythia", max_shard_size="60KB"))
    assert on_disk(view).folder == tmp_path
    assert on_disk(on_disk(view)) is on_disk(view)
    assert len(view.headers) > 3
    for header in view.headers:
        for tensor in header.tensors:
            first = view.made[tensor.name].sources[0].name
            assert tensor.shard == header.path.name == on_disk(view).tensors[first].shard
            data = b"".join(view.chunks(tensor.name))
            assert len(data) == tensor.nbytes
            read = torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(tensor.shape)
            assert torch.equal(read, view.read(tensor.name))
    assert view.num_parameters == sum(p.numel() for p in built(view).parameters())


def test_what_can_share_heads_is_left_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path))
    assert retargeted(checkpoint) is checkpoint
    assert target_config(checkpoint.config) is checkpoint.config
    with pytest.raises(PlanError, match="llama"):
        retargeted(checkpoint, "float32")


@pytest.mark.parametrize("model_type", RETARGETS)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type)
    rule = RETARGETS[model_type]
    factor = "partial_rotary_factor"
    nested = {"rotary_emb_base": "rope_theta", "rotary_pct": factor, factor: factor}
    for key, value in rule.settings({}).values.items():
        if key in nested:
            assert theirs.rope_parameters[nested[key]] == value
        else:
            assert getattr(theirs, key, None) == value, key
    assert rule.aliases == {k: v for k, v in theirs.attribute_map.items() if k in rule.aliases}


def test_every_rotary_dim_comes_back_from_phis_fraction() -> None:
    config = {"model_type": "gptj", "n_head": 1, **{k: BASE[k] for k in ("vocab_size",)}}
    for head_dim in range(2, 300, 2):
        for rotary_dim in range(2, head_dim + 1, 2):
            phi = target_config({**config, "n_embd": head_dim, "rotary_dim": rotary_dim})
            fraction = phi["rope_parameters"]["partial_rotary_factor"]
            assert int(head_dim * fraction) == rotary_dim
