"""huggingface/transformers#48307: tensor parallelism beyond the KV heads loads, then fails.

Also vllm-project/vllm#1640, #49987 and #452 and bigcode-project/Megatron-LM#51, where one KV head
is copied to every device. `plan` and `convert` say how far the result splits cleanly.
"""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from upcycle.cli import convert as _convert  # noqa: F401 - registers the command
from upcycle.cli import plan as _plan  # noqa: F401 - registers the command
from upcycle.cli.app import app


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_largest_clean_tensor_parallelism_is_said(tmp_path: Path, kv_heads: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    for command in (["plan", str(source)], ["convert", str(source), str(tmp_path / "out")]):
        result = CliRunner().invoke(app, [*command, "--kv-heads", str(kv_heads)])
        assert result.exit_code == 0, result.stderr
        sizes = [size for size in (1, 2, 4, 8) if size <= kv_heads]
        said = f"serves with tensor parallel {', '.join(map(str, sizes))}"
        assert re.search(rf"{said}(;|$)", result.stdout, re.MULTILINE), command[0]
