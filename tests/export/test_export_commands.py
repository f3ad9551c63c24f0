"""`upcycle export` and `upcycle graph` as a user calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.cli import export as _export  # noqa: F401 - registers the command
from upcycle.cli import graph as _graph  # noqa: F401 - registers the command
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
    assert document["state_bytes"] == 2 * 2 * 2 * 64 * 8 * 2
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


def test_graph_in_json(package: Path) -> None:
    done = upcycle("graph", package, "--json", "--bandwidth", "100GB/s")
    document = json.loads(done.stdout)
    function = document["functions"]["main"]
    assert function["operations"]["tile"] == function["tiles"]["kv"]["count"] == 4
    assert function["state_writes"] == {"keyCache": 2, "valueCache": 2}
    assert function["calls_per_second"] == pytest.approx(1e11 / function["traffic"]["total"])
    assert [row["num_key_value_heads"] for row in document["alternatives"]] == [8, 2, 2, 1]


def test_graph_as_text(package: Path) -> None:
    text = upcycle("graph", package).stdout
    assert "tile of K and V: 4, 32.0 KiB" in text
    assert "state keyCache [2, 2, 64, 8]: 2 writes" in text
    assert "at 55,900 MB/s at most" in text
    assert "GQA, Q-fold" in text


@pytest.mark.parametrize("bandwidth", ["fast", "0MB/s", "-1GB/s", "1.2.3GB/s", "5parsec/s"])
def test_graph_refuses_what_is_no_bandwidth(package: Path, bandwidth: str) -> None:
    done = upcycle("graph", package, f"--bandwidth={bandwidth}")
    assert done.exit_code == 2
    assert "where: --bandwidth" in done.stderr


def test_graph_refuses_what_is_no_package(tmp_path: Path) -> None:
    done = upcycle("graph", tmp_path)
    assert done.exit_code == 2
    assert "is no Core ML package" in done.stderr
