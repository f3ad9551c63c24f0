"""Tensors under other programs' names are told for what they are, with a way out that works."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.retarget_sources import source_checkpoint
from tests.regress.folders import load, logits, set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.headers import TensorSpec
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.planning import plan

WEIGHTS = "model.safetensors"


def rename(folder: Path, new: Callable[[str], str]) -> Path:
    """The same tensors under other names, in every file."""
    for path in folder.glob("*.safetensors"):
        tensors = {new(name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {new(name): shard for name, shard in index["weight_map"].items()}
        path.write_text(json.dumps(index))
    return folder


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        plan(folder, kv_heads=2)
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(CheckpointError) as inspected:
        inspect_checkpoint(Checkpoint.open(folder))
    assert str(inspected.value) == str(caught.value)
    return caught.value


PREFIXES: dict[str, tuple[Callable[[str], str], str]] = {
    "module": (lambda name: f"module.{name}", "'module.' of a training wrapper"),
    "language_model": (lambda name: f"language_model.{name}", "begins with 'language_model.'"),
    "base_model": (lambda name: f"base_model.model.{name}", "begins with 'base_model.model.'"),
    "compiled": (lambda name: f"_orig_mod.{name}", "'_orig_mod.' of a training wrapper"),
    "compiled and parallel": (
        lambda name: f"_orig_mod.module.{name}",
        "'_orig_mod.', 'module.' of a training wrapper",
    ),
    "compiled layers": (
        lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
        "'_orig_mod.' of a training wrapper",
    ),
    "fsdp": (
        lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
        "'_fsdp_wrapped_module.' of a training wrapper",
    ),
    "inside": (
        lambda name: name.replace("model.", "model.language_model.", 1),
        "begins with 'model.language_model.' instead of 'model.'",
    ),
    "text model": (
        lambda name: name.replace("model.", "text_model.", 1),
        "begins with 'text_model.' instead of 'model.'",
    ),
}


@pytest.mark.parametrize(
    ("case", "shards"), [*((case, "5GB") for case in PREFIXES), ("inside", "100KB")]
)
def test_foreign_prefixes_are_named_and_the_printed_command_removes_them(
    tmp_path: Path, case: str, shards: str
) -> None:
    source = tiny_checkpoint(tmp_path / "it's", max_shard_size=shards)
    expected = logits(load(source))
    new, words = PREFIXES[case]
    rename(source, new)
    error = refused(source)
    assert words in error.what
    _, command = error.fix.split(": ", 1)
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    convert(tmp_path / "renamed", tmp_path / "out", kv_heads=8)
    assert torch.equal(logits(load(tmp_path / "out")), expected)


def test_a_model_without_its_head_needs_no_prefix(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    tensors = load_file(source / WEIGHTS)
    bare = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(bare, source / WEIGHTS, metadata={"format": "pt"})
    assert plan(source, kv_heads=2).num_key_value_heads == 2


def test_retargeted_classes_get_the_same_words(tmp_path: Path) -> None:
    source = rename(source_checkpoint(tmp_path / "source", "pythia"), lambda n: f"module.{n}")
    with pytest.raises(CheckpointError, match=r"'module\.' of a training wrapper"):
        plan(source, kv_heads=2)


def meta(name: str) -> str:
    for old, new in {
        "model.layers": "layers",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
    }.items():
        name = name.replace(old, new)
    return name


LAYOUTS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "Meta": (meta, "attention.wk.weight is in Meta's own layout", "convert_llama_weights_to_hf.py"),
    "LoRA": (
        lambda n: n.replace("q_proj.weight", "q_proj.base_layer.weight"),
        "q_proj.base_layer.weight is a part of a LoRA that was never merged",
        "merge_and_unload()",
    ),
    "prefixed LoRA": (
        lambda n: "base_model.model." + n.replace("v_proj.weight", "v_proj.base_layer.weight"),
        "v_proj.base_layer.weight is a part of a LoRA that was never merged",
        "merge_and_unload()",
    ),
    "Baichuan": (
        lambda n: n.replace("q_proj", "W_pack"),
        "W_pack.weight is in Baichuan's layout",
        "split the rows",
    ),
    "InternLM2": (
        lambda n: n.replace("self_attn.q_proj", "attention.wqkv"),
        "attention.wqkv.weight is in InternLM2's layout",
        "convert2llama.py",
    ),
    "GGUF": (
        lambda n: n.replace("model.layers.", "blk.").replace("self_attn.", "attn_"),
        "is in GGUF's names",
        "gguf_file=",
    ),
    "Megatron": (
        lambda n: n.replace("self_attn.q_proj", "self_attention.linear_qkv"),
        "self_attention.linear_qkv.weight is in Megatron's layout",
        "export it to Hugging Face",
    ),
    "pruned": (
        lambda n: n.replace("q_proj.weight", "q_proj.weight_orig"),
        "q_proj.weight_orig is a part of a weight that torch's pruning",
        "torch.nn.utils.prune.remove",
    ),
    "parametrized": (
        lambda n: n.replace("v_proj.weight", "v_proj.parametrizations.weight.original0"),
        "v_proj.parametrizations.weight.original0 is a part of a weight",
        "remove_parametrizations",
    ),
    "torchtune": (
        lambda n: n.removeprefix("model.").replace("self_attn.", "attn."),
        "is in torchtune's names",
        "Hugging Face format",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_programs_tensors_are_told_for_what_they_are(tmp_path: Path, case: str) -> None:
    new, words, fix = LAYOUTS[case]
    error = refused(rename(tiny_checkpoint(tmp_path / "source"), new))
    assert words in error.what
    assert fix in error.fix


@pytest.mark.parametrize("layers", [3, 40])
@pytest.mark.parametrize("model_type", ["llama", "falcon", "gpt_neox"])
def test_more_layers_than_there_are_tells_the_number(
    tmp_path: Path, model_type: str, layers: int
) -> None:
    if model_type == "gpt_neox":
        source, there = source_checkpoint(tmp_path / "source", "pythia"), 3
        layers += 1
    else:
        source, there = tiny_checkpoint(tmp_path / "source", model_type), 2
    set_config(source, num_hidden_layers=layers)
    error = refused(source)
    assert f"has more layers than the tensors, which have {there}" in error.what
    assert f"to {there}, or fetch what is missing" in error.fix


def test_a_lora_beside_whole_attention_weights_is_told_too(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    tensors = load_file(source / WEIGHTS)
    tensors["model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.zeros(4, 64)
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    assert "LoRA that was never merged" in refused(source).what


def test_what_nothing_explains_shows_what_is_there(tmp_path: Path) -> None:
    source = rename(tiny_checkpoint(tmp_path / "source"), lambda n: n.replace("q_proj", "query"))
    set_config(source)
    assert "self_attn.query.weight is not part of the attention" in refused(source).what
    source = tiny_checkpoint(tmp_path / "biased")
    set_config(source, attention_bias=True)
    error = refused(source)
    assert error.what.startswith(
        "the checkpoint has no tensor model.layers.0.self_attn.q_proj.bias"
    )
    assert "it has model.layers.0.self_attn.k_proj.weight" in error.what


OLD_BUFFERS = {
    "rotary_emb.inv_freq": (4,),
    "rotary_emb.cos_cached": (1, 1, 16, 8),
    "rotary_emb.sin_cached": (1, 1, 16, 8),
    "masked_bias": (),
    "bias": (1, 1, 16, 16),
}


def test_old_buffers_beside_the_projections_are_copied(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    expected = logits(load(source))
    tensors = load_file(source / WEIGHTS)
    for name, shape in OLD_BUFFERS.items():
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(shape)
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    convert(source, tmp_path / "out", kv_heads=8)
    assert set(load_file(tmp_path / "out" / WEIGHTS)) == set(tensors)
    assert torch.equal(logits(load(tmp_path / "out")), expected)


def test_a_bias_is_no_mask() -> None:
    def is_buffer(name: str, *shape: int) -> bool:
        return TensorSpec(name, "F32", shape).is_buffer

    assert not is_buffer("model.layers.0.self_attn.bias", 64)
    assert not is_buffer("model.layers.0.self_attn.q_proj.bias", 1, 1, 4, 4)
    assert not is_buffer("model.layers.0.self_attn.rotary_emb.weight", 4)
    assert not is_buffer("model.embed_positions.weight", 4, 4)
    assert is_buffer("transformer.h.0.attn.bias", 1, 1, 8, 8)
    assert is_buffer("model.rotary_emb.inv_freq", 4)
