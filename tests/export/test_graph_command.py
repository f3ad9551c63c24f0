"""`upcycle graph` as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.cli import graph as _graph  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.errors import OutputError
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.pages.page import write_page


def graph(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["graph", *map(str, arguments)])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    source = tiny_checkpoint(folder / "source", num_key_value_heads=2)
    output = folder / "model.mlpackage"
    export_coreml(source, output, ExportOptions(context=64, attention="repeat-kv"))
    return output


def test_json(package: Path) -> None:
    done = graph(package, "--json", "--bandwidth", "100GB/s")
    document = json.loads(done.stdout)
    function = document["functions"]["main"]
    assert function["operations"]["tile"] == function["tiles"]["kv"]["count"] == 4
    assert function["state_writes"] == {"keyCache": 2, "valueCache": 2}
    assert function["calls_per_second"] == pytest.approx(1e11 / function["traffic"]["total"])
    assert function["tokens_per_call"] == 1
    assert document["bandwidth_source"] == "given by --bandwidth"
    this, *rows = document["compared"]
    assert [row["num_key_value_heads"] for row in rows] == [8, 2, 2, 1]
    assert this["bytes_per_token"] == function["traffic"]["total"] == rows[1]["bytes_per_token"]
    (tiled,) = [found for found in document["findings"] if found["lint"] == "kv-tile"]
    assert (tiled["severity"], tiled["function"], len(tiled["places"])) == ("error", "main", 4)


def test_text(package: Path) -> None:
    text = graph(package).stdout
    assert "tile of K and V: 4, 32.0 KiB" in text
    assert "state keyCache [2, 2, 64, 8]: 2 writes" in text
    assert "error: kv-tile: writes 8,192 B [1, 2, 4, 64, 8] of repeated keys or values" in text
    assert " and 3 more\n  fix: fold the query heads of a group" in text
    assert "GQA, Q-fold" in text
    assert "55,900 MB/s, fitted to one measurement on a phone: 54.30 tok/s" in text
    assert "implied" not in text


def test_weights_stand_for_those_of_a_real_model(package: Path) -> None:
    done = graph(package, "--json", "--weights", "778MB", "--measured", "20.39")
    document = json.loads(done.stdout)
    cache, repeated = 2 * 2 * 64 * 16 * 2, 2 * 2 * 8 * 64 * 16 * 2
    found = {row["name"]: row["bytes_per_token"] for row in document["compared"]}
    assert found["this graph"] == 778_000_000 + cache + repeated
    assert found["GQA, Q-fold"] == 778_000_000 + cache
    assert document["measured"]["implied_bytes_per_token"] == pytest.approx(2_741_540_000, rel=1e-5)
    text = graph(package, "--weights", "778MB", "--measured", "20.39").stdout
    assert "held at 778.00 MB/token" in text
    assert "implied by the measured 20.39 tok/s: 2,742 MB/token" in text


def test_only_strict_fails_on_an_error(package: Path) -> None:
    assert graph(package).exit_code == 0
    assert graph(package, "--strict").exit_code == 1


def test_html(package: Path, tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    page.write_text("older")
    done = graph(package, "--html", page, "--measured", "20.39")
    assert done.exit_code == 0, done.output
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    for text in ("1 errors", "kv-tile", "GQA, Q-fold", "keyCache", "slice_update"):
        assert text in html
    assert "2,742 MB per token" in html
    assert "http" not in html.replace("http-equiv", "")


def test_html_goes_into_a_folder_that_is_made(package: Path, tmp_path: Path) -> None:
    page = tmp_path / "missing" / "deep" / "graph.html"
    assert graph(package, "--html", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in page.parent.iterdir()] == ["graph.html"]


def test_html_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = graph(package, "--html", tmp_path / "file" / "graph.html")
    assert done.exit_code == 2
    assert "graph.html" in done.stderr


@pytest.mark.parametrize("name", ["Manifest.json", "new.html", "Data/new.html"])
def test_html_inside_the_package_is_refused_at_once(package: Path, name: str) -> None:
    before = hash_folder(package)
    done = graph(package, "--html", package / name)
    assert done.exit_code == 2
    assert "lies inside the input" in done.stderr
    assert done.stdout == ""
    assert hash_folder(package) == before


def test_a_page_inside_another_package_is_refused(package: Path) -> None:
    with pytest.raises(OutputError, match="lies inside the package"):
        write_page(package / "new.html", "graph.html.j2")


@pytest.mark.parametrize(
    "bandwidth", ["fast", "0MB/s", "-1GB/s", "1.2.3GB/s", "5parsec/s", "100Gb/s", "100gb/s"]
)
def test_what_is_no_bandwidth_is_refused(package: Path, bandwidth: str) -> None:
    done = graph(package, f"--bandwidth={bandwidth}")
    assert done.exit_code == 2
    assert f"'{bandwidth}' is no memory bandwidth" in done.stderr
    assert "where: --bandwidth" in done.stderr
    assert "100GB/s" in done.stderr


@pytest.mark.parametrize("bandwidth", ["100GB/s", "100 GB/s", "100GB", "100000000000"])
def test_bandwidth_is_in_bytes(package: Path, bandwidth: str) -> None:
    document = json.loads(graph(package, "--json", "--bandwidth", bandwidth).stdout)
    assert document["bandwidth"] == 100_000_000_000


@pytest.mark.parametrize("speed", ["-3", "0", "nan", "inf"])
def test_what_is_no_speed_is_refused(package: Path, speed: str) -> None:
    done = graph(package, f"--measured={speed}")
    assert done.exit_code == 2
    assert "where: --measured" in done.stderr


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    done = graph(tmp_path)
    assert done.exit_code == 2
    assert "is no Core ML package" in done.stderr
