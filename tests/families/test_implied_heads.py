"""Where the configuration's heads do not fit the tensors, the refusal tells those that do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.regress.folders import get_config, set_config
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import UpcycleError
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.kvcache.weights import weights_of
from upcycle.planning import plan

# How each tiny model is made, what its config.json then says (None: nothing), and the words.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "K above H": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_key_value_heads": 8, "head_dim": 16},
        ("4 query heads cannot share 8 KV heads evenly; its 64 query rows and 64 key rows are "
        "4 query heads and 4 KV heads of head_dim 16"),
        "set num_key_value_heads to 4, or set num_attention_heads to 8 and head_dim to 8 in",
    ),
    "K above H, head_dim left open": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_key_value_heads": 8, "head_dim": None},
        ("4 query heads and 4 KV heads of head_dim 16, or 8 query heads and 8 KV heads of "
        "head_dim 8"),
        "set num_key_value_heads to 4, or set num_attention_heads to 8 in config.json",
    ),
    "head_dim missing": (
        "llama",
        {
            "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 12,
        },
        {"head_dim": None},
        ("q_proj.weight has [72, 60]: its 72 query rows and 72 key rows are "
        "6 query heads and 6 KV heads of head_dim 12"),
        "set head_dim to 12 in config.json",
    ),
    "grouped without the key": (
        "llama",
        {"num_key_value_heads": 2},
        {"num_key_value_heads": None},
        "64 query rows and 16 key rows are 8 query heads and 2 KV heads of head_dim 8",
        "set num_key_value_heads to 2 in config.json",
    ),
    "another H": (
        "llama",
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        ("64 query rows and 64 key rows are 4 query heads and 4 KV heads of head_dim 16, or "
        "8 query heads and 8 KV heads of head_dim 8"),
        ("set head_dim to 16, or set num_attention_heads to 8 and num_key_value_heads to 8 in "
        "config.json"),
    ),
    "another hidden size": (
        "llama",
        {},
        {"hidden_size": 128},
        "8 query heads and 8 KV heads of head_dim 8",
        "set hidden_size to 64 in config.json",
    ),
    "no number": (
        "llama",
        {},
        {"num_key_value_heads": "8"},
        ("num_key_value_heads is '8', not a positive whole number that a model can have; its 64 "
        "query rows and 64 key rows are 8 query heads and 8 KV heads"),
        "set num_key_value_heads to 8 in config.json",
    ),
    "a norm of each head": (
        "qwen3",
        {"num_key_value_heads": 4},
        {"head_dim": 8, "num_key_value_heads": 8},
        "128 query rows and 64 key rows are 8 query heads and 4 KV heads of head_dim 16",
        "set num_key_value_heads to 4 and head_dim to 16 in config.json",
    ),
    "sinks": (
        "gpt_oss",
        {"num_key_value_heads": 2},
        {"num_attention_heads": 16, "num_key_value_heads": 4},
        "128 query rows and 32 key rows are 8 query heads and 2 KV heads of head_dim 16",
        "set num_attention_heads to 8 and num_key_value_heads to 2 in config.json",
    ),
    "fused": (
        "phi3",
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4},
        ("qkv_proj.weight has [96, 64]: its 64 query rows and 16 key rows are "
        "8 query heads and 2 KV heads of head_dim 8, or 16 query heads and 4 KV heads of "
        "head_dim 4"),
        "set num_key_value_heads to 2, or set num_attention_heads to 16 in config.json",
    ),
    "fused, K above H": (
        "phi3",
        {},
        {"num_key_value_heads": 16},
        ("8 query heads cannot share 16 KV heads evenly; its 64 query rows and 64 key rows are "
        "8 query heads and 8 KV heads of head_dim 8, or"),
        "set num_key_value_heads to 8, or set num_attention_heads to 16 in config.json",
    ),
    "a gate in the query rows": (
        "qwen3_next",
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 3},
        "128 query rows and 32 key rows are 8 query heads and 2 KV heads of head_dim 16",
        "set num_key_value_heads to 2 in config.json",
    ),
    "multi-query or not": (
        "falcon",
        {"multi_query": True},
        {"multi_query": False},
        "64 query rows and 8 key rows are 8 query heads and 1 KV heads of head_dim 8",
        "set multi_query to true in config.json",
    ),
}  # fmt: skip


def refused(folder: Path) -> UpcycleError:
    """Every command that looks says the same."""
    found = []
    for look in (
        lambda: plan(folder, kv_heads=1),
        lambda: inspect_checkpoint(Checkpoint.open(folder)),
        lambda: weights_of(Checkpoint.open(folder)),
    ):
        with pytest.raises(UpcycleError) as caught:
            look()
        found.append(str(caught.value))
    assert found == found[:1] * 3
    assert len(found[0].splitlines()) == 3
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_the_heads_of_the_tensors_are_told(tmp_path: Path, case: str) -> None:
    model_type, made, said, words, fix = CASES[case]
    source = tiny_checkpoint(tmp_path / "source", model_type, **made)
    set_config(source, **said)
    error = refused(source)
    assert words in error.what
    assert error.fix.startswith(fix)


@pytest.mark.parametrize("case", [name for name, entry in CASES.items() if " or " not in entry[4]])
def test_what_the_fix_says_is_enough(tmp_path: Path, case: str) -> None:
    model_type, made, said, _, fix = CASES[case]
    source = tiny_checkpoint(tmp_path / "source", model_type, **made)
    before = plan(source, kv_heads=1).source_shape
    set_config(source, **said)
    settings = fix.removeprefix("set ").removesuffix(" in config.json").split(" and ")
    changes = {key: json.loads(value) for key, value in (s.split(" to ") for s in settings)}
    set_config(source, **changes)
    assert plan(source, kv_heads=1).source_shape == before
    assert get_config(source)["model_type"] == model_type


def test_aliases_are_named_as_the_file_has_them(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "gpt_bigcode", multi_query=True)
    config = get_config(source)
    assert "n_head" in config
    set_config(source, n_head=4)
    error = refused(source)
    assert "are 8 query heads and 1 KV heads of head_dim 8" in error.what
    assert error.fix.startswith("set n_head to 8 in config.json")


def test_layers_that_differ_are_told(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    for part in "kv":
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name][:16].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    error = refused(source)
    assert (
        "layer 0 has 64 query rows and 64 key rows, layer 1 64 query rows and 16 key rows"
        in error.what
    )
    assert "all have the same heads" in error.fix


def test_where_heads_explain_nothing_the_shapes_alone_are_told(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(7)
    save_file(tensors, path, metadata={"format": "pt"})
    error = refused(source)
    assert error.what.endswith(
        "asks for shape [64] but model.layers.0.self_attn.k_proj.bias has [7]"
    )


@pytest.mark.parametrize("heads", [2, 4, 16, 32])
def test_norms_of_each_head_say_how_many_there_are(tmp_path: Path, heads: int) -> None:
    """Rows of q and k may be any number of heads; a norm of each one's channels may not."""
    source = tiny_checkpoint(tmp_path, "stablelm", qk_layernorm=True)  # 8 heads of 8
    plan(source, kv_heads=1)
    settings = json.loads((source / "config.json").read_text())
    settings |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    (source / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UpcycleError) as caught:
        plan(source, kv_heads=1)
    assert "are 8 query heads and 8 KV heads of head_dim 8" in caught.value.what
    assert "set num_attention_heads to 8 and num_key_value_heads to 8 in config" in caught.value.fix
    assert "num_hidden_layers" not in caught.value.fix
    assert ("is the norm of a head that config.json does not describe" in caught.value.what) == (
        heads < 8
    )
