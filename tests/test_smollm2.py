"""A real pretrained model through convert, verify and eval by the commands that a user types."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from upcycle.checkpoint.manifest import hash_folder

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    run("scripts/make_smollm2.py", folder)
    return folder


def test_as_many_kv_heads_as_before_is_bit_identical(source: Path) -> None:
    output = source.with_name("kept")
    run("-m", "upcycle", "convert", source, output, "--kv-heads", 3)
    assert hash_folder(output) == hash_folder(source)


def test_multi_query_is_verified_and_compared_on_english_text(source: Path) -> None:
    kept, merged = source.with_name("kept-3"), source.with_name("merged-1")
    run("-m", "upcycle", "convert", source, kept, "--kv-heads", 3)
    run("-m", "upcycle", "convert", source, merged, "--kv-heads", 1)
    checks = json.loads(run("-m", "upcycle", "verify", source, merged, "--json"))
    assert checks["passed"]
    text = source.with_name("english.jsonl")
    run("scripts/make_english_text.py", text)
    report = source.with_name("report")
    arguments = ["eval", source, kept, merged, "--out", report, "--text", text, "--json"]
    result = json.loads(run("-m", "upcycle", *arguments, "--max-tokens", 2000))
    original, same, few = result["comparison"]["models"]
    assert original["nll"] < 3.6, "the source models English"
    assert same["nll"] == original["nll"]
    assert same["divergence"]["kl"]["max"] == 0
    assert same["divergence"]["top1_agreement"] == 1
    assert few["divergence"]["kl"]["mean"] > 1, "mean merging 3 heads to 1 hurts a real model"
    assert few["kv_cache"]["bytes_per_token"] * 3 == original["kv_cache"]["bytes_per_token"]
    assert (report / "report.html").stat().st_size > 10_000
