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


def test_as_many_kv_heads_as_before_is_bit_identical(smollm2: Path, tmp_path: Path) -> None:
    run("-m", "upcycle", "convert", smollm2, tmp_path / "kept", "--kv-heads", 3)
    assert hash_folder(tmp_path / "kept") == hash_folder(smollm2)


def test_multi_query_is_verified_and_compared_on_english_text(
    smollm2: Path, tmp_path: Path
) -> None:
    kept, merged = tmp_path / "kept", tmp_path / "merged"
    run("-m", "upcycle", "convert", smollm2, kept, "--kv-heads", 3)
    run("-m", "upcycle", "convert", smollm2, merged, "--kv-heads", 1)
    checks = json.loads(run("-m", "upcycle", "verify", smollm2, merged, "--json"))
    assert checks["passed"]
    english, report = tmp_path / "english", tmp_path / "report"
    run("scripts/make_english_text.py", english)
    text = english / "heldout.jsonl"
    arguments = ["eval", smollm2, kept, merged, "--out", report, "--text", text, "--json"]
    result = json.loads(run("-m", "upcycle", *arguments, "--max-tokens", 2000))
    original, same, few = result["comparison"]["models"]
    assert original["nll"] < 3.6, "the source models English"
    assert same["nll"] == original["nll"]
    assert same["divergence"]["kl"]["max"] == 0
    assert same["divergence"]["top1_agreement"] == 1
    assert few["divergence"]["kl"]["mean"] > 1, "mean merging 3 heads to 1 hurts a real model"
    assert few["kv_cache"]["bytes_per_token"] * 3 == original["kv_cache"]["bytes_per_token"]
    assert (report / "report.html").stat().st_size > 10_000
