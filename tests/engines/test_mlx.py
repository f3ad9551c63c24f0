"""mlx-lm, which knows nothing of us, continues conversions with transformers' tokens.

Slow: `scripts/setup_engines.sh` first fetches mlx-lm into a folder of its own. All models are read
in one process, in fp32, on the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.retarget_sources import randomised
from tests.tiny import byte_tokenizer, convert
from upcycle.families.rope_spelling import missing_rope_keys

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 250, 17, 99, 3, 42], [7, 8, 9, 200, 201, 202, 33, 12], [101, 3, 77]]
LENGTH = 32
BASE = {
    "vocab_size": 260,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NEOX = {"intermediate_size": 512, "rotary_pct": 0.25}
_SEQUENTIAL = {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500}
# name: (model type, settings, KV heads)
EQUAL: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2": ("qwen2", {"intermediate_size": 512, "num_key_value_heads": 4}, 2),
    "neox, heads of 64": ("gpt_neox", _NEOX, 2),
    "neox, heads of 80": ("gpt_neox", {**_NEOX, "hidden_size": 320}, 2),
    "neox, another base": ("gpt_neox", {**_NEOX, "rotary_emb_base": 500_000}, 2),
    "neox, sequential": ("gpt_neox", {**_NEOX, **_SEQUENTIAL}, 2),
    "gptj": ("gptj", {"rotary_dim": 24}, 2),
    "codegen": ("codegen", {"rotary_dim": 24}, 2),
    "gpt2": ("gpt2", {}, 1),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}, 1),
    "opt, gelu": ("opt", {"ffn_dim": 1024, "activation_function": "gelu"}, 1),
}
# Conversions that a warning says mlx-lm gets wrong, and words of the warning.
WARNED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "qwen2, rope_parameters alone": (*EQUAL["qwen2"], "rope_parameters"),
    "neox, scaled": (
        "gpt_neox",
        {**_NEOX, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        2,
        "rope_scaling",
    ),
    "neox, sequential, partial rotary": (
        "gpt_neox",
        {**_NEOX, "use_parallel_residual": False},
        2,
        "relu2",
    ),
    "gpt2, all heads": ("gpt2", {}, 4, "one KV head alone"),
    "opt, relu": ("opt", {"ffn_dim": 1024}, 1, "activation_function relu"),
}
pytestmark = pytest.mark.slow
Tokens = list[list[int]]


def greedy(folder: Path) -> Tokens:
    """transformers' tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False}
    found = [model.generate(torch.tensor([ids]), **settings)[0, len(ids) :] for ids in PROMPTS]
    return [row.tolist() for row in found]


def source(folder: Path, model_type: str, settings: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **settings})
    randomised(AutoModelForCausalLM.from_config(config).float()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def add_older_keys(folder: Path) -> None:
    """What the warning of a conversion asks for."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **missing_rope_keys(config)}))


@pytest.fixture(scope="module")
def tokens(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path
) -> dict[str, tuple[Tokens, Tokens]]:
    """Of each conversion, and of two sources: transformers' tokens and mlx-lm's."""
    folder = tmp_path_factory.mktemp("engines")
    folders = {"SmolLM2, the source": smollm2, "SmolLM2": folder / "SmolLM2"}
    convert(smollm2, folders["SmolLM2"], kv_heads=1)
    for name, (model_type, settings, kv_heads) in EQUAL.items():
        made = source(folder / f"{name}, the source", model_type, settings)
        add_older_keys(made)
        folders[name] = folder / name
        assert convert(made, folders[name], kv_heads=kv_heads)
        if name == "qwen2":
            folders["qwen2, the source"] = made
    for name, (model_type, settings, kv_heads, words) in WARNED.items():
        made = source(folder / f"{name}, the source", model_type, settings)
        folders[name] = folder / name
        warnings = convert(made, folders[name], kv_heads=kv_heads).plan.warnings
        assert any(words in warning for warning in warnings), warnings
    subprocess.run(
        ["bash", ROOT / "scripts" / "setup_engines.sh"],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    script = Path(__file__).with_name("mlx_tokens.py")
    done = subprocess.run(
        [sys.executable, script, str(LENGTH), json.dumps(PROMPTS), *folders.values()],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".cache" / "engines")},
    )
    theirs = json.loads(done.stdout)
    return {n: (greedy(folders[n]), made) for n, made in zip(folders, theirs, strict=True)}


@pytest.mark.parametrize("name", ["SmolLM2, the source", "SmolLM2", "qwen2, the source", *EQUAL])
def test_the_tokens_are_those_of_transformers(
    tokens: dict[str, tuple[Tokens, Tokens]], name: str
) -> None:
    ours, theirs = tokens[name]
    assert theirs == ours
    assert [len(row) for row in ours] == [LENGTH] * len(PROMPTS)


@pytest.mark.parametrize("name", WARNED)
def test_what_is_warned_of_goes_wrong(tokens: dict[str, tuple[Tokens, Tokens]], name: str) -> None:
    ours, theirs = tokens[name]
    assert theirs != ours
