"""What a server sets aside for layers with a window, by the numbers that vLLM reserves."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache.test_kv_commands import CONFIG, headers_only, result_of, run
from upcycle.kvcache.deployment import default_batched_tokens
from upcycle.kvcache.layout import cache_layout

# https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json, text_config
GEMMA_3_27B = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}
LLAMA_4 = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
}


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    config = tmp_path / "gemma.json"
    config.write_text(json.dumps(GEMMA_3_27B))
    return config


def capacity(config: Path, *options: str) -> dict[str, Any]:
    return result_of("capacity", config, "--weights", "54GB", "--context", "8192", *options)


def blocks(data: dict[str, Any]) -> int:
    """Of 16 tokens, 16 heads, 128 + 128 channels, 2 bytes."""
    (now,) = (fit for fit in data["fits"] if fit["kv_heads"] == 16)
    return int(now["request_bytes"]) // (16 * 16 * 256 * 2)


# 10 layers see all: 512 blocks each. The other 52 keep 1,023 tokens: 64 blocks, and one more.
WINDOW_ALONE = 10 * 512 + 52 * 65


@pytest.mark.parametrize(
    ("options", "in_a_window", "times"),
    [
        (["--gpu-memory", "80GB", "--batched-tokens", "8192"], 512 + 1, 3.7),
        (["--gpu-memory", "80GB", "--batched-tokens", "2048"], 192 + 1, 1.8),
        (["--gpu-memory", "80GB"], 512 + 1, 3.7),  # vLLM's server takes 8,192 on it
        (["--gpu", "A100-80GB"], 192 + 1, 1.8),  # and 2,048 on an A100
        (["--gpu", "L40S"], 192 + 1, 1.8),  # and on a smaller GPU
    ],
    ids=str,
)
def test_gemma_3_27b_takes_the_blocks_that_vllm_reserves(
    gemma: Path, options: list[str], in_a_window: int, times: float
) -> None:
    data = capacity(gemma, *options)
    found = blocks(data)
    assert found == 10 * 512 + 52 * in_a_window
    assert found / WINDOW_ALONE == pytest.approx(times, abs=0.05)
    assert data["deployment"]["batched_tokens"] in (2048, 8192)


def test_what_a_token_adds_is_the_same(gemma: Path) -> None:
    one, other = (
        capacity(gemma, "--gpu-memory", "80GB", "--batched-tokens", step) for step in ("1", "8192")
    )
    for few, many in zip(one["fits"], other["fits"], strict=True):
        assert few["kv_bytes_per_token"] == many["kv_bytes_per_token"]
        assert few["decode_step_bytes"] == many["decode_step_bytes"]
        assert few["requests"] >= many["requests"]
    assert one["fits"][0]["requests"] > other["fits"][0]["requests"]


def test_the_recommendation_knows(gemma: Path) -> None:
    """As many requests as fit without a step of prefill need fewer heads with one."""
    few = capacity(gemma, "--gpu-memory", "80GB", "--batched-tokens", "1")
    (now,) = (fit for fit in few["fits"] if fit["kv_heads"] == 16)
    options = ["--gpu-memory", "80GB", "--batch", str(now["requests"])]
    chosen = [
        capacity(gemma, *options, "--batched-tokens", step)["recommendation"]["kv_heads"]
        for step in ("1", "8192")
    ]
    assert chosen == [16, 4]


def test_the_number_and_its_source_are_said(gemma: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--weights", "54GB", "--gpu-memory", "80GB", "--html", page]
    output = run("capacity", gemma, *options).stdout
    for text in (output, page.read_text()):
        assert "52 of 62 layers see a window of 1,024 tokens" in text
        assert "1,023 + 8,192 tokens there, and a block" in text
        assert "transformers caches the latest 1,023 tokens alone" in text
        assert "EngineArgs.get_batch_defaults" in text


def test_chunks_begin_with_a_block(tmp_path: Path) -> None:
    config = tmp_path / "llama4.json"
    config.write_text(json.dumps(LLAMA_4))
    options = ["--weights", "200GB", "--gpu", "H200", "--gpus", "2", "--context", "65536"]
    data = result_of("capacity", config, *options)
    (now,) = (fit for fit in data["fits"] if fit["kv_heads"] == 8)
    # 12 layers see all 65,536 tokens, 36 a chunk of 8,192 and the step's 8,192.
    assert now["request_bytes"] == (12 * 65_536 + 36 * 16_384) * 8 * 256 * 2
    assert (
        "36 of 48 layers attend in chunks of 8,192 tokens"
        in run("capacity", config, *options).stdout
    )


def test_states_do_not_depend_on_the_step() -> None:
    config = {
        "model_type": "lfm2",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
    }
    layout = cache_layout(config)
    assert layout.state_elements > 0
    assert layout.reserved_blocks(100, 16, 1) == layout.reserved_blocks(100, 16, 8192) == 7


def test_the_default_is_that_of_vllms_server() -> None:
    assert default_batched_tokens(80 * 10**9) == 8192
    assert default_batched_tokens(70 * 2**30) == 8192
    assert default_batched_tokens(70 * 2**30 - 1) == 2048
    assert default_batched_tokens(80 * 10**9, "NVIDIA A100-SXM4-80GB") == 2048


def test_inspect_says_what_a_server_sets_aside(tmp_path: Path) -> None:
    windowed = {**CONFIG, "model_type": "mistral", "sliding_window": 100}
    folder = headers_only(tmp_path, windowed)
    data = result_of("inspect", folder)
    a_token = 2 * 4 * (4 + 4) * 2 // 2  # of one of the two layers
    assert data["batched_tokens"] == 2048
    assert data["reserved_bytes"] == 2 * (-(-(99 + 2048) // 16) + 1) * 16 * a_token
    assert data["cache_bytes"] == 2 * 99 * a_token
    more = result_of("inspect", folder, "--batched-tokens", "9999")
    assert more["reserved_bytes"] == 2 * (4096 // 16 + 1) * 16 * a_token
    assert more["choices"] == data["choices"]
    assert "computes 2,048 tokens in one step" in run("inspect", folder).stdout


@pytest.mark.parametrize("command", [["inspect"], ["capacity", "--gpu-memory", "80GB"]], ids=str)
@pytest.mark.parametrize("step", ["0", "-1"])
def test_a_step_has_a_token(tmp_path: Path, command: list[str], step: str) -> None:
    name, *rest = command
    done = run(name, headers_only(tmp_path, CONFIG), *rest, "--batched-tokens", step)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: batched_tokens cannot be {step}\n")
