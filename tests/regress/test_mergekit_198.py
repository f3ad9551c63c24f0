"""arcee-ai/mergekit#198: a vocabulary in config.json that the embedding does not have.

Also arcee-ai/mergekit#425. The result was written without a word, and nothing could load it.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.regress.folders import set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import read_manifest
from upcycle.cli.app import COMMANDS, app
from upcycle.errors import StrictError, UpcycleWarning

for _name in COMMANDS:  # each registers itself
    import_module(f"upcycle.cli.{_name.replace('-', '_')}")

WORDS = (
    "2 mismatched: lm_head.weight is [260, 64], the class has [300, 64], "
    "model.embed_tokens.weight is [260, 64], the class has [300, 64]"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / "source")
    set_config(folder, vocab_size=300)
    return folder


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_conversion_warns_and_records_it(tmp_path: Path, source: Path, kv_heads: int) -> None:
    with pytest.warns(UpcycleWarning, match="LlamaForCausalLM of transformers") as told:
        result = convert(source, tmp_path / "out", kv_heads=kv_heads)
    assert [str(entry.message) for entry in told] == result.warnings
    assert result.warnings[0].endswith(WORDS)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.result.document["warnings"] == result.warnings
    mismatched = manifest.result.document["class"]["mismatched"]
    assert mismatched["lm_head.weight"] == [[260, 64], [300, 64]]


def test_a_sound_source_is_recorded_as_before(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    result = convert(source, tmp_path / "out", kv_heads=2, strict=True)
    assert result.warnings == []
    assert set(result.manifest.document["result"]) == {
        "files",
        "method_reference",
        "layers",
        "extra_attention",
    }


@pytest.mark.parametrize("settings", [{}, {"calibration": ["builtin"], "calibration_tokens": 512}])
def test_strict_refuses_before_anything_is_written(
    tmp_path: Path, source: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(StrictError, match="2 mismatched"):
        convert(source, tmp_path / "out", kv_heads=2, strict=True, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line(tmp_path: Path, source: Path) -> None:
    result = run("convert", source, tmp_path / "out", "--kv-heads", 2, "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: LlamaForCausalLM of transformers ")
    assert json.loads(result.stdout)["warnings"][0].endswith(WORDS)

    result = run("convert", source, tmp_path / "strict", "--kv-heads", 2, "--strict")
    assert (result.exit_code, result.stdout) == (1, "")
    error, where, fix = result.stderr.splitlines()
    assert error.startswith("error: LlamaForCausalLM of transformers ")
    assert str(source) in where
    assert "--strict" in fix
    assert not (tmp_path / "strict").exists()


def test_quiet_says_nothing(tmp_path: Path, source: Path) -> None:
    result = run("convert", source, tmp_path / "out", "--kv-heads", 2, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
