"""`upcycle export` as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.cli import export as _export  # noqa: F401 - registers the command
from upcycle.cli.app import app


def upcycle(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    source = tiny_checkpoint(folder / "source", num_key_value_heads=2)
    output = folder / "model.mlpackage"
    done = upcycle("export", source, output, "--context", 64, "--attention", "repeat-kv", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["kv_tiles"], document["kv_tile_bytes"]) == (4, 32_768)
    assert document["kv_cache_bytes"] == 2 * 2 * 2 * 64 * 8 * 2
    return output


def test_export_says_what_was_made(package: Path) -> None:
    source = package.with_name("source")
    output = package.with_name("qfold.mlpackage")
    done = upcycle("export", source, output, "--context", 64)
    assert done.exit_code == 0, done.output
    assert "operations, 0 copies of K and V (0 B), 8.0 KiB of KV cache for 64 tokens" in done.stdout


def test_export_refuses_in_three_lines(package: Path, tmp_path: Path) -> None:
    done = upcycle("export", package.with_name("source"), tmp_path / "a.mlpackage", "--context", 40)
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "where", "fix"]


def test_text_to_calibrate_on_is_for_quantised_weights(package: Path, tmp_path: Path) -> None:
    arguments = (package.with_name("source"), tmp_path / "a.mlpackage", "--calibration", "builtin")
    done = upcycle("export", *arguments)
    assert done.exit_code == 2
    assert "there is nothing to calibrate without quantised weights" in done.stderr
    done = upcycle("export", package.with_name("source"), "a.aimodel", "--quantize", "int8")
    assert done.exit_code == 2
    assert "Core AI assets have no --quantize" in done.stderr
