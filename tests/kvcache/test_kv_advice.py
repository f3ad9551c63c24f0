"""Advice at its edges: one KV head, latents, sizes of tensor parallelism, names of dtypes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache.published import DEEPSEEK_V2, LLAMA_3_70B
from tests.kvcache.test_kv_commands import CONFIG, headers_only, result_of, run
from upcycle.cli import plan as _plan  # noqa: F401 - registers the command
from upcycle.cli import predict as _predict  # noqa: F401
from upcycle.errors import UpcycleError
from upcycle.kvcache.cache_dtype import CACHE_DTYPES, cache_dtype
from upcycle.kvcache.deployment import tensor_parallel

MERGED = "already multi-query: nothing to merge"


def with_heads(heads: int, kv_heads: int) -> dict[str, Any]:
    return {**CONFIG, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["capacity", "--gpu-memory", "1GB"], ["plan", "--kv-heads", "1"], ["predict"]],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("heads", [8, 1])
def test_one_kv_head_has_nothing_to_merge(tmp_path: Path, command: list[str], heads: int) -> None:
    name, *rest = command
    done = run(name, headers_only(tmp_path, with_heads(heads, 1)), *rest)
    assert done.exit_code == 0, done.stderr
    assert MERGED in done.stdout
    assert "go lower" not in done.stdout


@pytest.mark.parametrize("command", [["inspect"], ["capacity", "--gpu-memory", "1GB"]], ids=str)
def test_several_can_be_merged(tmp_path: Path, command: list[str]) -> None:
    name, *rest = command
    assert MERGED not in run(name, headers_only(tmp_path, CONFIG), *rest).stdout


def test_a_batch_that_one_kv_head_does_not_hold_is_told(tmp_path: Path) -> None:
    folder = headers_only(tmp_path, with_heads(8, 1))
    options = ["--gpu-memory", "1MB"]
    holds = result_of("capacity", folder, *options)["recommendation"]
    assert holds == {"kv_heads": 1, "reason": MERGED}
    (fit,) = (
        fit for fit in result_of("capacity", folder, *options)["fits"] if fit["kv_heads"] == 1
    )
    for batch in (fit["requests"], fit["requests"] + 1):
        reason = result_of("capacity", folder, *options, "--batch", str(batch))["recommendation"]
        short = "" if batch == fit["requests"] else f"{fit['requests']:,} of "
        assert reason["reason"] == f"{MERGED}; it holds {short}the {batch:,} requests asked for"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "gpus", "reason"),
    [
        (8, 4, 1, "the model has no more already, and about 8 keep most"),
        (12, 12, 1, "the next lower number is 6, and about 8 keep most"),
        (8, 2, 4, "each of the 4 GPUs holds one KV head; fewer save nothing more"),
        (12, 6, 4, "the model's 6 do not split over 4 GPUs, and no larger number below does"),
    ],
)
def test_the_reason_is_the_one(
    tmp_path: Path, heads: int, kv_heads: int, gpus: int, reason: str
) -> None:
    config = {**with_heads(heads, kv_heads), "hidden_size": heads * 4}
    folder = headers_only(tmp_path, config)
    data = result_of("capacity", folder, "--gpu-memory", "1GB", "--gpus", str(gpus))
    assert data["recommendation"]["reason"].startswith(reason)


def test_a_latent_takes_as_many_heads_as_the_rows_say(tmp_path: Path) -> None:
    config = tmp_path / "deepseek.json"
    config.write_text(json.dumps(DEEPSEEK_V2))
    data = result_of("capacity", config, "--weights", "472GB", "--gpu", "H200", "--gpus", "8")
    stored = {fit["kv_heads"]: fit["kv_bytes_per_token"] for fit in data["fits"]}
    reason = data["recommendation"]["reason"]
    said = re.search(r"takes as much as ([\d.]+) KV heads of (\d+) \+ (\d+) channels", reason)
    assert said is not None
    # Each of the 8 GPUs has the latent, and one of the 8 heads.
    assert stored[None] / stored[8] == pytest.approx(float(said[1])) == pytest.approx(1.8)
    assert stored[8] == 60 * 8 * (int(said[2]) + int(said[3])) * 2
    assert "(2.25 KV heads without the 64 rotary channels" in reason
    short = result_of(
        "capacity", config, "--weights", "472GB", "--gpu", "H200", "--gpus", "8",
        "--batch", "1000000",
    )["recommendation"]  # fmt: skip
    assert short["reason"].endswith("of the 1,000,000 requests asked for")


@pytest.mark.parametrize("heads", range(1, 65))
def test_sizes_are_those_that_vllm_takes(heads: int) -> None:
    for kv_heads in (g for g in range(1, heads + 1) if heads % g == 0):
        found = tensor_parallel(heads, kv_heads)
        taken = []
        for size in range(1, heads + 1):
            if heads % size:
                continue
            if kv_heads >= size:
                taken += [size] if kv_heads % size == 0 else []
            else:
                taken += [size] if size % kv_heads == 0 else []
        assert list(found.sizes) == taken
        assert all(kv_heads % size == 0 for size in found.stored_once)
        assert all(size > kv_heads for size in found.copied)


def test_sizes_are_listed_wherever_serving_is_told(tmp_path: Path) -> None:
    config = {**with_heads(12, 6), "hidden_size": 48}
    (tmp_path / "source").mkdir()
    folder = headers_only(tmp_path / "source", config)
    page = tmp_path / "page.html"
    line = "serves with tensor parallel 1, 2, 3, 6; with 12 GPUs hold copies of the same KV heads"
    assert line in run("plan", folder, "--kv-heads", "6").stdout
    assert f"g=6 {line}" in run("capacity", folder, "--gpu-memory", "1GB", "--html", page).stdout
    for text in (run("inspect", folder).stdout, page.read_text()):
        assert "1, 2, 3, 6 (12 with copies)" in text
        assert "up to 6" not in text
    sizes = {"stored_once": [1, 2, 3, 6], "copied": [12]}
    (inspected,) = (c for c in result_of("inspect", folder)["choices"] if c["kv_heads"] == 6)
    assert inspected["tensor_parallel"] == sizes
    fits = result_of("capacity", folder, "--gpu-memory", "1GB")["fits"]
    assert {fit["kv_heads"]: fit["tensor_parallel"] for fit in fits}[6] == sizes


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("fp32", "fp32"), ("float32", "fp32"), ("f32", "fp32"), ("float", "fp32"),
        ("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16"), ("F16", "fp16"),
        ("bf16", "bf16"), ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("BF16", "bf16"),
        ("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("fp8_e5m2", "fp8"), ("fp8-e4m3", "fp8"),
        ("float8_e4m3fn", "fp8"), ("torch.float8_e5m2", "fp8"), ("F8_E4M3", "fp8"),
        ("int8", "int8"), ("int8_per_token_head", "int8"), ("int4", "int4"),
        ("fp8_per_token_head", "fp8_per_token_head"),
    ],
)  # fmt: skip
def test_usual_spellings_are_one_dtype(spelling: str, name: str) -> None:
    assert cache_dtype(spelling).name == name


@pytest.mark.parametrize("name", ["fp7", "int3", "", "nvfp4", "auto"])
def test_what_is_unknown_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(UpcycleError, match="unknown KV cache dtype") as caught:
        cache_dtype(name)
    assert all(known in caught.value.fix for known in CACHE_DTYPES)


def test_commands_take_the_same_words(tmp_path: Path) -> None:
    folder = headers_only(tmp_path, CONFIG)
    a_token = 2 * 4 * (4 + 4)  # elements, of 2 layers and 4 heads
    for spelling, name, size in (("float32", "fp32", 4), ("fp8_e5m2", "fp8", 1)):
        data = result_of("capacity", folder, "--gpu-memory", "1GB", "--kv-dtype", spelling)
        (now,) = (fit for fit in data["fits"] if fit["kv_heads"] == 4)
        assert (data["deployment"]["kv_dtype"], now["kv_bytes_per_token"]) == (name, size * a_token)
        data = result_of("inspect", folder, "--kv-dtype", spelling)
        (choice,) = (each for each in data["choices"] if each["kv_heads"] == 4)
        assert (data["kv_dtype"], choice["kv_bytes_per_token"]) == (name, size * a_token)
    for command in (["inspect"], ["capacity", "--gpu-memory", "1GB"]):
        name, *rest = command
        done = run(name, folder, *rest, "--kv-dtype", "fp7")
        assert done.exit_code == 2
        assert done.stderr.startswith("error: unknown KV cache dtype 'fp7'\n  where: --kv-dtype\n")


def test_llama_3_70b_in_fp32_takes_twice_bf16(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_70B))
    options = ["--weights", "140GB", "--gpu", "H200", "--gpus", "4", "--kv-dtype"]
    twice, once = (result_of("capacity", config, *options, dtype) for dtype in ("fp32", "bf16"))
    for wide, narrow in zip(twice["fits"], once["fits"], strict=True):
        assert wide["kv_bytes_per_token"] == 2 * narrow["kv_bytes_per_token"]
