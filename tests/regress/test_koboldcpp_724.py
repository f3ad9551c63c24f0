"""LostRuins/koboldcpp#724: Qwen1.5-72B needs 82120 MiB of KV cache, and nothing said so before."""

import re
from pathlib import Path

from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from upcycle.cli import inspect as _inspect  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.kvcache.counting import kv_cache_bytes

QWEN_72B = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}


def test_the_reported_figure_is_what_is_counted() -> None:
    length = 32848  # 2.5 MiB a token: the report's 82120 MiB are 32768 tokens and 80 more
    assert kv_cache_bytes(QWEN_72B, length=length) == 82120 << 20
    assert kv_cache_bytes(QWEN_72B, kv_heads=8, length=length) * 8 == 82120 << 20


def test_inspect_prints_bytes_a_token_before_and_after(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")  # 2 layers, 8 heads of 8, fp32
    result = CliRunner().invoke(app, ["inspect", str(source)])
    assert result.exit_code == 0, result.stderr
    rows = re.findall(r"^ *(\d)(?: \(now\))? +(\w+) +([\d,]+)", result.stdout, re.MULTILINE)
    assert rows == [
        ("8", "MHA", "1,024"), ("4", "GQA", "512"), ("2", "GQA", "256"), ("1", "MQA", "128"),
    ]  # fmt: skip
