"""`upcycle inspect` and `upcycle capacity` as a user calls them."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.kvcache.published import DEEPSEEK_V2, LLAMA_3_70B
from upcycle.checkpoint.headers import TensorSpec, header_bytes
from upcycle.checkpoint.reader import Checkpoint
from upcycle.cli import capacity as _capacity  # noqa: F401 - registers the command
from upcycle.cli import inspect as _inspect  # noqa: F401 - registers the command
from upcycle.cli import sweep as _sweep  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.families import family_of
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.planning import plan

HEAVY = {"torch", "transformers", "numpy", "jinja2"}
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1000,
}


def headers_only(folder: Path, config: dict[str, Any], dtype: str = "BF16") -> Path:
    """A checkpoint of attention and an embedding whose data is a hole in the file."""
    family = family_of(config)
    shape = family.shape(config)
    tensors = [TensorSpec("model.embed_tokens.weight", "F32", (10, shape.hidden_size))]
    for layer in range(shape.num_layers):
        names, shapes = family.tensor_names(layer, shape), family.tensor_shapes(shape)
        tensors += [TensorSpec(name, dtype, shapes[role]) for role, name in names.items()]
    header = header_bytes(tensors, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_inspect_reports_the_model_and_every_choice(tmp_path: Path) -> None:
    data = result_of("inspect", headers_only(tmp_path, CONFIG))
    assert (data["model_type"], data["kind"]) == ("qwen2", "GQA")
    assert data["num_parameters"] == 320 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 32 + 2 * 16)
    assert data["bytes_by_dtype"] == {"BF16": 2 * (data["num_parameters"] - 320), "F32": 1280}
    assert data["weight_bytes"] == sum(data["bytes_by_dtype"].values())
    assert [choice["kv_heads"] for choice in data["choices"]] == [8, 4, 2, 1]
    assert [choice["kind"] for choice in data["choices"]] == ["MHA", "GQA", "GQA", "MQA"]
    assert [choice["kv_bytes_per_token"] for choice in data["choices"]] == [256, 128, 64, 32]
    assert data["choices"][2]["cache_bytes_saved"] == (128 - 64) * data["reference_length"]


def test_weights_saved_are_those_of_the_plan(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(headers_only(tmp_path, CONFIG))
    for choice in inspect_checkpoint(checkpoint).choices:
        planned = plan(checkpoint, kv_heads=choice.kv_heads).output_bytes
        assert choice.weight_bytes_saved == checkpoint.weight_bytes - planned


def test_inspect_counts_every_choice_and_a_latent_beside(tmp_path: Path) -> None:
    data = result_of("inspect", headers_only(tmp_path, CONFIG))
    assert [counts["kv_heads"] for counts in data["counts"]] == [8, 4, 2, 1]
    assert len({counts["core_macs"] for counts in data["counts"]}) == 1
    assert data["latent_counts"]["elements_per_token_and_layer"] == 4 * 4 + 2
    output = run("inspect", tmp_path).stdout
    assert "MLA *" in output
    assert "no conversion makes it" in output


def test_inspect_counts_a_window_and_a_state_as_what_they_are(tmp_path: Path) -> None:
    windowed = {**CONFIG, "model_type": "mistral", "sliding_window": 100}
    data = result_of("inspect", headers_only(tmp_path, windowed))
    assert data["window_layers"] == 2
    assert data["cache_bytes"] == 99 * data["choices"][1]["kv_bytes_per_token"]
    assert "2 layers cache a window alone" in run("inspect", tmp_path).stdout


def test_inspect_shows_a_table_for_people(tmp_path: Path) -> None:
    output = run("inspect", headers_only(tmp_path, CONFIG, dtype="F32")).stdout
    assert "GQA: 8 query heads, 4 KV heads, head_dim 4, 2 layers" in output
    assert "4 (now)" in output
    assert "4 bytes an element" in output


def test_inspect_refuses_a_config_that_contradicts_the_tensors(tmp_path: Path) -> None:
    headers_only(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 2}))
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "k_proj" in result.stderr
    assert len(result.stderr.splitlines()) == 3


def test_capacity_of_a_bare_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_70B))
    options = ["--weights", "140GB", "--reserve", "20GB", "--gpu-memory", "80GB", "--gpus", "4"]
    data = result_of("capacity", config, *options, "--batch", "32")
    requests = {fit["kv_heads"]: fit["requests"] for fit in data["fits"]}
    assert (requests[8], requests[64]) == (59, 7)
    assert data["recommendation"]["kv_heads"] == 8
    assert data["deployment"]["context"] == 8192
    table = run("capacity", config, *options).stdout
    assert "8 (now)" in table
    assert "warning: g=2: each KV head is stored on 2 GPUs" in table


def test_capacity_takes_shrinking_weights_from_the_headers(tmp_path: Path) -> None:
    data = result_of("capacity", headers_only(tmp_path, CONFIG), "--gpu-memory", "1MiB")
    checkpoint = Checkpoint.open(tmp_path)
    for fit in data["fits"]:
        assert fit["weight_bytes"] == plan(checkpoint, kv_heads=fit["kv_heads"]).output_bytes


def test_capacity_of_a_latent_and_a_distribution_of_lengths(tmp_path: Path) -> None:
    config = tmp_path / "deepseek.json"
    config.write_text(json.dumps(DEEPSEEK_V2))
    options = ["--weights", "472GB", "--gpu", "H200", "--gpus", "8", "--lengths", "512:7,8192:3"]
    data = result_of("capacity", config, *options)
    assert data["fits"][data["now"]]["kind"] == "MLA"
    assert data["num_key_value_heads"] is None
    assert data["deployment"]["context"] == 8192
    assert data["fits"][0]["requests"] > data["fits"][0]["requests_at_context"]
    table = run("capacity", config, *options).stdout
    assert "latent (now)" in table
    assert "if all grow to the context" in table
    assert "step on H200" in table


def test_capacity_names_what_is_stored_once_and_the_time_of_a_step(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_70B))
    options = ["--weights", "140GB", "--gpu", "h100-sxm", "--gpus", "4", "--batch", "32"]
    data = result_of("capacity", config, *options)
    assert data["deployment"]["gpu_memory"] == 80 * 10**9
    assert data["without_waste"] == [64, 32, 16, 8, 4]
    (device,) = data["devices"]
    for fit, seconds in zip(data["fits"], device["step_seconds"], strict=True):
        assert seconds == pytest.approx(fit["decode_step_bytes"] / 4 / 3.35e12)
    assert "https://" in device["source"]


def test_capacity_tells_dtypes_windows_and_states(tmp_path: Path) -> None:
    windowed = {**CONFIG, "model_type": "mistral", "sliding_window": 100}
    output = run("capacity", headers_only(tmp_path, windowed), "--gpu-memory", "1GB").stdout
    assert (
        "2 of 2 layers see a window of 100 tokens: a request takes the smaller of its length and "
        "99 + 2,048 tokens there, and a block; transformers caches the latest 99 tokens alone"
    ) in output
    assert "weights: BF16" in output
    assert "F32 1.2 KiB" in output


def test_capacity_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "source").mkdir()
    folder = headers_only(tmp_path / "source", CONFIG)
    run("capacity", folder, "--gpu-memory", "1GB", "--html", page)
    html = page.read_text()
    assert "g=4 (now)" in html
    assert html.count("data-choice>") == 4
    outside = [word for word in re.findall(r"""(?:src|href)=["'][^"']*""", html) if "#" not in word]
    assert outside == []
    result = run("capacity", folder, "--gpu-memory", "1GB", "--html", page / "page.html")
    assert result.exit_code == 2
    assert "error: cannot write" in result.stderr
    assert page.read_text() == html
    result = run("capacity", folder, "--gpu-memory", "1GB", "--html", folder / "config.json")
    assert result.exit_code == 2
    assert "lies inside the input" in result.stderr
    assert json.loads((folder / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the memory of a GPU is not known"),
        (["--gpu", "H1000"], "unknown device 'H1000'"),
        (
            ["--gpu", "H200", "--lengths", "5"],
            "'' is not a length in tokens, or not how often it occurs",
        ),
        (["--gpu-memory", "80GB", "--gpus", "0"], "gpus cannot be 0"),
        (["--gpu-memory", "80GB", "--context", "-1"], "context cannot be -1"),
        (["--gpu-memory", "80 GPUs"], "'80 GPUs' is not a memory size"),
        (["--gpu-memory", "80GB", "--kv-dtype", "fp7"], "unknown KV cache dtype 'fp7'"),
        (["--gpu-memory", "80GB", "--batch", "0"], "batch cannot be 0"),
        (["--gpu-memory", "80GB", "--gpus", "3"], "tensor_parallel cannot be 3"),
        (["--gpu-memory", "80GB", "--weights", "many"], "'many' is not a memory size"),
        (["--gpu-memory", "9" * 400], f"'{'9' * 400}' is not a memory size"),
        (
            ["--gpu-memory", "80GB", "--lengths", ",".join(["100:x"] * 99)],
            "'x' is not a length in tokens, or not how often it occurs",
        ),
    ],
)
def test_nonsense_is_refused_in_three_lines(
    tmp_path: Path, options: list[str], message: str
) -> None:
    result = run("capacity", headers_only(tmp_path, CONFIG), *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}\n")
    assert len(result.stderr.splitlines()) == 3


def test_a_bare_config_without_weights_asks_for_them(tmp_path: Path) -> None:
    headers_only(tmp_path, CONFIG)
    result = run("capacity", tmp_path / "config.json", "--gpu-memory", "80GB")
    assert result.exit_code == 2
    assert "give --weights" in result.stderr


def test_weights_larger_than_memory_are_an_answer(tmp_path: Path) -> None:
    result = run("capacity", headers_only(tmp_path, CONFIG), "--gpu-memory", "1KB")
    assert result.exit_code == 0
    assert "0 requests fit" in result.stdout


@pytest.mark.parametrize("options", [["inspect"], ["capacity", "--gpu-memory", "80GiB"]], ids=str)
def test_four_gigabytes_take_less_than_a_second_of_cpu(tmp_path: Path, options: list[str]) -> None:
    layers = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    folder = headers_only(tmp_path, {**CONFIG, **layers, "hidden_size": 4096})
    assert (folder / "model.safetensors").stat().st_size > 4 * 10**9
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = f"""
import sys
from upcycle.cli import main
sys.argv = ["upcycle", {options[0]!r}, {str(folder)!r}, *{options[1:]!r}, "--quiet"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
print({HEAVY!r} & sys.modules.keys())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1


@pytest.mark.parametrize(("own", "width"), [("float16", 2), ("torch.bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_is_the_model_s_own_dtype(tmp_path: Path, own: str, width: int, key: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, key: own}))
    given = (config, "--weights", "1GB", "--gpu-memory", "80GB", "--kv-dtype")
    found = result_of("capacity", *given, "auto")
    heads = {fit["kv_heads"]: fit["kv_bytes_per_token"] for fit in found["fits"]}
    assert heads[4] == 2 * 2 * 4 * 4 * width  # K and V, layers, heads, head_dim
    assert found == result_of("capacity", *given, own)
    stored = headers_only(tmp_path, {**CONFIG, key: own}, "F16")
    assert result_of("inspect", stored, "--kv-dtype", "auto")["kv_dtype"] == "fp16"


@pytest.mark.parametrize("name", ["", " ", "double-ended", "auto"])
def test_a_dtype_that_says_nothing_is_refused_with_the_list(tmp_path: Path, name: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    size = ("--weights", "1GB", "--gpu-memory", "80GB")
    result = run("capacity", config, *size, "--kv-dtype", name)
    assert result.exit_code == 2
    what, where, fix = result.stderr.splitlines()
    unnamed = "config.json names no dtype, which the KV cache could have too"
    assert what == f"error: {unnamed if name == 'auto' else f'unknown KV cache dtype {name!r}'}"
    assert "--kv-dtype" in where
    assert "bf16, fp16, fp32, fp64, fp8, fp8_per_token_head, int8, int4" in fix
    assert "auto for the model's own" in fix
    stored = headers_only(tmp_path, CONFIG, "BF16")
    for words in (["inspect", stored], ["sweep", stored, "--kv-heads", "2"]):
        done = run(*words, "--kv-dtype", name)
        assert done.exit_code == (0 if name == "auto" and words[0] == "inspect" else 2)
        assert done.exit_code == 0 or done.stderr.splitlines()[0] == what
