"""What the pages show of a command's output is what it prints."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, read_page

LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
}


def example(command: str) -> tuple[list[str], list[str]]:
    """The words of the example of a command in docs/capacity.md, and the lines that it shows."""
    blocks = [block for _, block in read_page(ROOT / "docs" / "capacity.md").blocks]
    (shown,) = [block for block in blocks if block.startswith(f"$ upcycle {command} ")]
    first, *lines = shown.splitlines()
    return shlex.split(first)[2:], lines


def printed(words: list[str], folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "upcycle", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return (done.stdout + done.stderr).splitlines()


def test_capacity_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    words, shown = example("capacity")
    found = printed(words, tmp_path)
    assert [line for line in shown if line not in found] == []


@pytest.mark.slow
def test_sweep_prints_what_is_shown() -> None:
    """The exact columns: measured ones may differ in their last digit on another machine."""
    words, (_, *rows) = example("sweep")
    found = [line.split() for line in printed(words, ROOT)]
    for row in rows:
        name, _, exact = row.partition("  ")
        cells = [*name.split(), *exact.split()[:2]]
        assert cells in [line[: len(cells)] for line in found], row
        assert ("same bits" in row) == ("now" in row)
