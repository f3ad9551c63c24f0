"""Bytes per token: the closed form's known figures, and the graph's own count against it."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.tiny import tiny_checkpoint
from upcycle.attention import AttentionShape, Rope
from upcycle.errors import ExportError
from upcycle.export.coreml import ExportResult, export_coreml
from upcycle.kvcache.counting import parameters_saved
from upcycle.options.attention_forms import FORMS
from upcycle.options.export import ExportOptions
from upcycle.program.bandwidth import (
    ExportFigures,
    alternatives,
    closed_form_bytes,
    describe_export,
    tokens_per_second,
)
from upcycle.program.counting import count_traffic
from upcycle.program.graph import Function
from upcycle.program.operation import Operation, TensorType, Weight
from upcycle.program.reading import read_graph

MIB = 2**20
EXAONE = {"num_layers": 30, "num_attention_heads": 32, "head_dims": 128, "context": 4096}
EXAONE_WITHOUT_CACHE = 778_000_000


@pytest.mark.parametrize(
    ("groups", "copies", "megabytes", "rate"),
    [
        (32, 0, 1785, 31.3),
        (32, 1, 1785, 31.3),
        (16, 0, 1281, 43.6),
        (8, 0, 1030, 54.3),  # 54.30 was measured on a phone
        (8, 1, 3043, 18.4),  # 20.39 was measured on a phone
        (1, 0, 809, 69.1),
    ],
)
def test_closed_form_of_a_published_model(
    groups: int, copies: int, megabytes: int, rate: float
) -> None:
    """EXAONE 4.0 1.2B at 4,096 tokens, decoded by an app that published its speeds."""
    count = closed_form_bytes(
        EXAONE_WITHOUT_CACHE, num_key_value_heads=groups, copies=copies, **EXAONE
    )
    assert round(count / 1e6) == megabytes
    assert tokens_per_second(count) == pytest.approx(rate, abs=0.05)


def test_repeating_writes_960_mib_of_copies_and_reads_them_again() -> None:
    counts = [
        closed_form_bytes(0, num_key_value_heads=8, copies=copies, **EXAONE) for copies in (0, 1)
    ]
    assert counts[1] - counts[0] == 2 * 960 * MIB


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportResult]:
    folder = tmp_path_factory.mktemp("traffic")
    source = tiny_checkpoint(folder / "source", "gemma", num_key_value_heads=2)
    return {
        attention: export_coreml(
            source,
            folder / f"{attention}.mlpackage",
            ExportOptions(context=96, attention=attention),
        )
        for attention in FORMS
    }


def test_the_graphs_own_count_is_the_closed_form(exports: dict[str, ExportResult]) -> None:
    for attention, result in exports.items():
        traffic = count_traffic(result.function)
        assert traffic.kv_read == 2 * 2 * 96 * (16 + 16) * 2
        assert traffic.kv_write == 2 * 2 * (16 + 16) * 2
        assert traffic.copies == FORMS[attention].copies * 2 * 2 * 8 * 96 * (16 + 16) * 2
        assert traffic.total == closed_form_bytes(
            traffic.without_cache,
            num_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dims=32,
            context=96,
            copies=FORMS[attention].copies,
        )


def test_every_weight_is_read_once_but_of_tables_only_a_row(
    exports: dict[str, ExportResult],
) -> None:
    function = exports["qfold"].function
    tables = 2 * 96 * 16 * 2  # cosines and sines
    rows = 64 * 2 + 2 * 16 * 2  # of the embedding, which is also the head, and of both tables
    shared = 8 * 16 * 2  # the zero bias of both query projections is one constant, read twice
    stored = function.weight_bytes
    assert count_traffic(function).weights == stored - tables + rows + shared


def test_alternatives_of_a_grouped_graph(exports: dict[str, ExportResult]) -> None:
    graph = read_graph(exports["qfold"].package)
    rows = {row.name: row for row in alternatives(graph)}
    assert list(rows) == ["MHA", "GQA, repeat-kv", "GQA, Q-fold", "MQA, Q-fold"]
    assert [row.num_key_value_heads for row in rows.values()] == [8, 2, 2, 1]
    assert rows["GQA, Q-fold"].bytes_per_token == count_traffic(graph.functions["main"]).total
    assert rows["GQA, repeat-kv"].bytes_per_token > rows["MHA"].bytes_per_token


def test_description_for_the_report(exports: dict[str, ExportResult]) -> None:
    source = AttentionShape(2, 8, 8, 16, 16, 64, Rope("half", 16), False, False)
    section = describe_export(source, exports["qfold"].package)
    assert section.kv_tiles == 0
    compared = section.compared
    assert [row.num_key_value_heads for row in compared.values()] == [8, 2, 2]
    assert [row.kv_tiles for row in compared.values()] == [0, 4, 0]
    assert compared["qfold"].bytes_per_token == section.bytes_per_token["total"]
    saved = compared["source"].bytes_per_token - compared["qfold"].bytes_per_token
    cache, weights = 6 * 2 * 96 * 32 * 2, parameters_saved(source, 2) * 2
    assert saved == cache + weights
    stored = json.loads(json.dumps(asdict(section)))
    assert TypeAdapter(ExportFigures).validate_python(stored) == section
    assert describe_export(source, exports["repeat-kv"].package).kv_tiles == 4


def function_of(*operations: Operation, **types: TensorType) -> Function:
    return Function(
        operations,
        types,
        states={},
        weights={
            name: Weight(size, Path("weight.bin"), size)
            for name, size in (("codes", 32), ("scale", 4))
        },
    )


def test_compressed_weights_count_as_stored() -> None:
    half = TensorType((1, 64), "float16")
    function = function_of(
        Operation(
            "constexpr_blockwise_shift_scale",
            {"data": ("codes",), "scale": ("scale",)},
            ("weight",),
        ),
        Operation("linear", {"x": ("x",), "weight": ("weight",)}, ("y",)),
        weight=TensorType((1, 64), "float16"),
        x=half,
        y=TensorType((1, 1), "float16"),
    )
    traffic = count_traffic(function)
    assert (traffic.weights, traffic.activations) == (36, 128 + 2)


def test_a_tile_of_something_else_is_no_copy_of_keys() -> None:
    function = function_of(
        Operation("tile", {"x": ("x",), "reps": ("reps",)}, ("y",)),
        x=TensorType((1, 8), "float16"),
        y=TensorType((4, 8), "float16"),
    )
    (tile,) = function.tiles
    assert (tile.of_kv, tile.nbytes) == (False, 64)
    assert count_traffic(function).copies == 0


def test_dynamic_shapes_have_no_traffic() -> None:
    function = function_of(
        Operation("relu", {"x": ("x",)}, ("y",)),
        x=TensorType((1, None), "float16"),
        y=TensorType((1, None), "float16"),
    )
    with pytest.raises(ExportError, match="dynamic shapes"):
        count_traffic(function)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it has no Manifest.json"),
        ({"Manifest.json": b"{}"}, "names no root model"),
        ({"Manifest.json": b"not JSON"}, "names no root model"),
        (
            {"Manifest.json": b'{"rootModelIdentifier": "a"}'},
            "no root model",
        ),
        ({"Manifest.json": None}, "lacks model.mlmodel"),
        ({"Manifest.json": None, "Data/model.mlmodel": b"broken"}, "is no Core ML specification"),
        ({"Manifest.json": None, "Data/model.mlmodel": b""}, "the package holds no model"),
    ],
)
def test_a_broken_package_is_refused(
    tmp_path: Path, files: dict[str, bytes | None], message: str
) -> None:
    (tmp_path / "Data").mkdir()
    manifest = {"rootModelIdentifier": "a", "itemInfoEntries": {"a": {"path": "model.mlmodel"}}}
    for name, content in files.items():
        (tmp_path / name).write_bytes(json.dumps(manifest).encode() if content is None else content)
    with pytest.raises(ExportError, match=message):
        read_graph(tmp_path)


def test_a_truncated_package_is_refused(exports: dict[str, ExportResult], tmp_path: Path) -> None:
    copy = shutil.copytree(exports["qfold"].package, tmp_path / "copy.mlpackage")
    program = copy / "Data" / "com.apple.CoreML" / "model.mlmodel"
    program.write_bytes(program.read_bytes()[:-1000])
    with pytest.raises(ExportError, match="is no Core ML specification"):
        read_graph(copy)


def test_reading_a_graph_loads_neither_torch_nor_coremltools(
    exports: dict[str, ExportResult],
) -> None:
    code = f"""
import sys
from upcycle.program.reading import read_graph
from upcycle.program.bandwidth import alternatives
assert alternatives(read_graph({str(exports["qfold"].package)!r}))
assert not {{"torch", "coremltools", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
