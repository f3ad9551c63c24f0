"""The published figures of EXAONE 4.0 1.2B's attention, in graphs of its shape but hardly a width.

30 layers, 32 query heads, 8 KV heads of 64 channels, and 4,096 tokens: an app that decodes it on a
phone reports 60 `tile` operations and 960 MiB of their output, and none of either once fixed.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from upcycle.cli import graph as _graph  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.program.graph import Graph
from upcycle.program.reading import read_graph

MIB = 2**20
SHAPE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def export_thin(folder: Path, layers: int, attention: str, kv_cache: str) -> Path:
    source = folder / f"source-{layers}"
    if not source.exists():
        kinds = ["full_attention"] * layers
        tiny_checkpoint(source, "exaone4", num_hidden_layers=layers, layer_types=kinds, **SHAPE)
    package = folder / f"{attention}-{kv_cache}.mlpackage"
    export_coreml(
        source, package, ExportOptions(context=4096, attention=attention, kv_cache=kv_cache)
    )
    return package


def document_of(package: Path, *options: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["graph", str(package), "--json", *options])
    assert done.exit_code == 0, done.output
    document: dict[str, object] = json.loads(done.stdout)
    return document


def has_concat_of_kv(graph: Graph) -> bool:
    return any(
        op.type == "concat" and graph.decode.kv.values.intersection(op.outputs)
        for op in graph.decode.operations
    )


def check_figures(folder: Path, layers: int) -> None:
    """Hold a model of some layers against the figures, which grow with the layers."""
    share = layers / 30
    qfold, repeated, read_only = (
        export_thin(folder, layers, attention, kv_cache)
        for attention, kv_cache in (
            ("qfold", "state"),
            ("repeat-kv", "state"),
            ("qfold", "read-only"),
        )
    )
    options = ["--weights", f"{round(778_000_000 * share)}B", "--measured", "20.39"]
    documents = {
        "qfold": document_of(qfold, *options),
        "repeat-kv": document_of(repeated, *options),
        "read-only": document_of(read_only, *options),
    }
    main = {name: each["functions"]["main"] for name, each in documents.items()}  # type: ignore[index]
    assert main["repeat-kv"]["tiles"]["kv"] == {
        "count": 2 * layers,
        "bytes": 2 * layers * 16 * MIB,
    }
    assert main["repeat-kv"]["traffic"]["copies"] == 2 * 2 * layers * 16 * MIB
    for name in ("qfold", "read-only"):
        assert main[name]["tiles"]["kv"] == {"count": 0, "bytes": 0}
        assert main[name]["traffic"]["copies"] == 0
    operations = {name: sum(each["operations"].values()) for name, each in main.items()}
    assert operations["read-only"] < operations["qfold"] < operations["repeat-kv"]
    assert not has_concat_of_kv(read_graph(read_only))

    for name, megabytes in (("qfold", 1030), ("repeat-kv", 3043), ("read-only", 1030)):
        this, *rows = documents[name]["compared"]  # type: ignore[misc]
        assert this["bytes_per_token"] / 1e6 == pytest.approx(megabytes * share, abs=0.5)
        found = {row["name"]: row["bytes_per_token"] / 1e6 for row in rows}
        assert found["GQA, Q-fold"] == pytest.approx(1030 * share, abs=0.5)
        assert found["GQA, repeat-kv"] == pytest.approx(3043 * share, abs=0.5)
        assert found["MHA"] == pytest.approx(1785 * share, abs=0.5)
        measured = documents[name]["measured"]
        assert measured["implied_bytes_per_token"] / 1e6 == pytest.approx(2742, abs=0.5)  # type: ignore[index]


def test_two_layers_have_their_share_of_the_figures(tmp_path: Path) -> None:
    check_figures(tmp_path, 2)


@pytest.mark.slow
def test_thirty_layers_have_the_published_figures(tmp_path: Path) -> None:
    check_figures(tmp_path, 30)
    graph = read_graph(tmp_path / "repeat-kv-state.mlpackage")
    tiles = [tile for tile in graph.decode.tiles if tile.of_kv]
    assert len(tiles) == 60
    assert sum(tile.nbytes for tile in tiles) == 1_006_632_960  # 960.0 MiB
