"""Damaged packages, and packages whose metadata only look like ours, in `graph` and the check."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.cli import check_export as _check  # noqa: F401 - registers the command
from upcycle.cli import graph as _graph  # noqa: F401
from upcycle.cli.app import app
from upcycle.errors import ExportError, UpcycleError
from upcycle.export.coreml import export_coreml
from upcycle.export.quiet import quiet_coremltools
from upcycle.options.export import ExportOptions
from upcycle.parity.asset import Asset
from upcycle.parity.exported import Program
from upcycle.program.bandwidth import alternatives
from upcycle.program.chunked import chunk_paths, read_exported
from upcycle.program.graph import METADATA_KEY, Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.noted import noted_manifest, required_manifest
from upcycle.program.reading import read_graph
from upcycle.program.specification import read_specification, write_metadata, write_specification

with quiet_coremltools():
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder

WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
BROKEN = [
    "not json", "", "{}", "[]", "null", "3", "[" * 100_000, '{"options": {}}', '{"result": null}',
    '{"source": {}, "options": {"context": "x"}, "result": {"decoder": {}}}',
    '{"source": {}, "options": {"context": 64}, "result": {"decoder": 3}}',
    '{"result": {"chunk": 7, "decoder": 3}}',
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def package(source: Path) -> Path:
    output = source.with_name("model.mlpackage")
    return export_coreml(source, output, ExportOptions(context=64)).package


@pytest.fixture(scope="module")
def exported(package: Path) -> Graph:
    return read_graph(package)


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    """The package alone, without the folder beside it."""
    return shutil.copytree(package, tmp_path / package.name)


@pytest.fixture
def folder(package: Path, tmp_path: Path) -> Path:
    """The package as the only chunk of an export."""
    output = tmp_path / "chunks"
    chunk = shutil.copytree(package, output / "chunk1.mlpackage")
    beside = json.loads((package.with_name("model-tokenizer") / "upcycle.json").read_text())
    manifest = json.loads(read_graph(package).metadata[METADATA_KEY])
    manifest["result"]["chunk"] = {"number": 1, "of": 1, "first_layer": 0, "num_layers": 1}
    write_metadata(chunk, {METADATA_KEY: json.dumps(manifest)})
    weights = beside["result"]["package"][WEIGHTS.as_posix()]
    beside["result"] |= {"chunks": [{}], "files": {f"{chunk.name}/{WEIGHTS}": weights}}
    (output / "upcycle.json").write_text(json.dumps(beside))
    return output


def upcycle(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def refusal(done: Result) -> str:
    """The first of the three lines of an error."""
    assert done.exit_code == 2, done.output
    first, where, fix = done.stderr.splitlines()
    assert where.startswith("  where: ")
    assert fix.startswith("  fix: ")
    return first


def flip(file: Path, begin: int = 20_000) -> None:
    content = bytearray(file.read_bytes())
    content[begin : begin + 200] = bytes(byte ^ 0x55 for byte in content[begin : begin + 200])
    file.write_bytes(content)


@pytest.mark.parametrize("entry", BROKEN)
def test_a_broken_entry_is_not_ours(source: Path, copy: Path, entry: str) -> None:
    write_metadata(copy, {METADATA_KEY: entry})
    done = upcycle("graph", copy, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["attention_source"] == "graph"
    (found,) = (each for each in document["findings"] if each["lint"] == "broken-manifest")
    assert found["severity"] == "warning"
    first = refusal(upcycle("check-export", source, copy))
    assert first.startswith("error: the manifest of `upcycle export` is damaged: ")


def test_a_whole_entry_is_ours(exported: Graph) -> None:
    assert noted_manifest(exported) is not None
    assert "broken-manifest" not in {found.lint for found in lint_graph(exported)}


@given(data=st.data())
def test_any_entry_is_read_or_refused(exported: Graph, data: st.DataObject) -> None:
    document = json.loads(exported.metadata[METADATA_KEY])
    parents = [document, document["options"], document["result"], document["result"]["decoder"]]
    parent = data.draw(st.sampled_from(parents))
    key = data.draw(st.sampled_from(sorted(parent)))
    number = st.integers() | st.floats() | st.booleans()
    odd = st.recursive(
        st.none() | number | st.text(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=3,
    )
    if data.draw(st.booleans()):
        parent[key] = data.draw(odd)
    else:
        del parent[key]
    graph = replace(exported, metadata={METADATA_KEY: json.dumps(document)})
    lint_graph(graph)
    alternatives(graph)
    try:
        manifest = required_manifest(graph, Path("x.mlpackage"))
    except ExportError:
        assert noted_manifest(graph) is None
    else:
        assert manifest.options.context == 64
        assert manifest.result.decoder.num_layers < 1000


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("options", "context", 96), ("decoder", "num_layers", 10**9), ("decoder", "masks", {"a": 1})],
)
def test_the_entry_of_another_program_is_refused(
    exported: Graph, section: str, key: str, value: object
) -> None:
    document = json.loads(exported.metadata[METADATA_KEY])
    {"options": document["options"], "decoder": document["result"]["decoder"]}[section][key] = value
    graph = replace(exported, metadata={METADATA_KEY: json.dumps(document)})
    with pytest.raises(ExportError, match=f"is damaged: .*{key}"):
        required_manifest(graph, Path("x.mlpackage"))
    with pytest.raises(ExportError, match="is damaged: the program has no function 'main'"):
        required_manifest(replace(graph, functions={}), Path("x.mlpackage"))


@pytest.mark.parametrize("text", [*BROKEN, '{"stage": "export"}', '{"stage": 5}', '{"stage": []}'])
def test_a_folder_with_a_broken_manifest_is_refused(source: Path, folder: Path, text: str) -> None:
    (folder / "upcycle.json").write_text(text)
    assert "damaged" in refusal(upcycle("graph", folder))
    assert "damaged" in refusal(upcycle("check-export", source, folder))


@pytest.mark.parametrize("entry", BROKEN)
def test_a_chunk_with_a_broken_entry_is_refused(folder: Path, entry: str) -> None:
    assert read_exported(folder).functions.keys() == {"main"}
    write_metadata(folder / "chunk1.mlpackage", {METADATA_KEY: entry})
    assert "is not chunk 1 of the export" in refusal(upcycle("graph", folder))


def test_a_value_that_nothing_makes_is_named(copy: Path) -> None:
    model = read_specification(copy)
    function = model.mlProgram.functions["main"]
    operation = function.block_specializations[function.opset].operations[-1]
    operation.outputs[0].name = "other"
    write_specification(copy, model)
    first = refusal(upcycle("graph", copy))
    assert re.fullmatch(r"error: the program reads '\w+', which nothing in it makes", first)


def test_loops_and_branches_are_read(tmp_path: Path) -> None:
    """Their blocks have inputs of their own."""

    @Builder.program(  # type: ignore[untyped-decorator]
        input_specs=[Builder.TensorSpec((1, 8))], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        x = Builder.while_loop(
            _cond=lambda x: Builder.less(x=Builder.reduce_max(x=x), y=9.0),
            _body=lambda x: (Builder.mul(x=x, y=2.0),),
            loop_vars=(x,),
        )
        positive = Builder.greater(x=Builder.reduce_max(x=x), y=0.0)
        return Builder.cond(
            pred=positive,
            _true_fn=lambda: Builder.add(x=x, y=1.0),
            _false_fn=lambda: Builder.sub(x=x, y=1.0),
        )

    with quiet_coremltools():
        model = ct.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS18)
        model.save(str(tmp_path / "loop.mlpackage"))
    done = upcycle("graph", tmp_path / "loop.mlpackage", "--json")
    counts = json.loads(done.stdout)["functions"]["main"]["operations"]
    assert {"while_loop", "cond", "mul", "add", "sub"} <= counts.keys()


def _missing(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _other(file: Path) -> None:
    flip(file, begin=64)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_missing, "is missing"),
        (_cut, "is cut off"),
        (_empty, "is cut off"),
        (_folder, "is missing"),
        (_other, "does not hold this constant"),
    ],
)
def test_a_damaged_weight_file_is_named(
    copy: Path, folder: Path, damage: Callable[[Path], None], what: str
) -> None:
    for output, inner in ((copy, copy), (folder, folder / "chunk1.mlpackage")):
        damage(inner / WEIGHTS)
        assert refusal(upcycle("graph", output)) == f"error: the weight file {what}"


def test_a_changed_package_is_refused(source: Path, package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "model.mlpackage")
    beside = shutil.copytree(package.with_name("model-tokenizer"), tmp_path / "model-tokenizer")
    Program.read(copy)
    flip(copy / WEIGHTS)
    expected = f"error: {WEIGHTS} of model.mlpackage is not the file that `upcycle export` made"
    assert refusal(upcycle("check-export", source, copy)) == expected
    assert refusal(upcycle("check-export", source, package, "--against", copy)) == expected
    link = tmp_path / "link.mlpackage"
    link.symlink_to(copy)
    assert refusal(upcycle("check-export", source, link)) == expected
    assert upcycle("graph", copy).exit_code == 0
    shutil.rmtree(beside)
    Program.read(copy)  # nothing says what it was


def test_a_folder_of_another_kind_says_nothing_of_a_package(copy: Path, tmp_path: Path) -> None:
    beside = tmp_path / "model-tokenizer"
    beside.mkdir()
    for manifest in ({"stage": "convert", "result": {}}, None):
        if manifest is not None:
            (beside / "upcycle.json").write_text(json.dumps(manifest))
        else:
            (beside / "upcycle.json").unlink()
        Program.read(copy)


def test_a_changed_chunk_is_refused(source: Path, folder: Path) -> None:
    (chunk,) = chunk_paths(folder)
    Program.read(folder)
    flip(chunk / WEIGHTS)
    with pytest.raises(ExportError, match=r"chunk1\.mlpackage is not the file that"):
        Program.read(folder)


def test_a_core_ai_asset_is_called_one(source: Path, package: Path, tmp_path: Path) -> None:
    asset = tmp_path / "model.aimodel"
    asset.mkdir()
    (asset / "main.mlirb").touch()
    expected = f"error: {asset} is a Core AI asset, no Core ML package"
    assert refusal(upcycle("graph", asset)) == expected
    assert refusal(upcycle("check-export", source, package, "--against", asset)) == expected


@pytest.mark.parametrize("change", [{"result": {}}, {"options": {"context": 64}}, {"source": 1}])
def test_an_asset_with_a_broken_manifest_is_refused(
    package: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    manifest = json.loads((package.with_name("model-tokenizer") / "upcycle.json").read_text())
    manifest["options"]["dtype"] = "float16"
    (tmp_path / "upcycle.json").write_text(json.dumps(manifest | change))
    with pytest.raises(UpcycleError, match=r"(the manifest of `upcycle export`|json) is damaged: "):
        Asset.read(tmp_path)


def test_what_the_file_system_refuses_is_an_error(source: Path) -> None:
    name = "x" * 300
    assert refusal(upcycle("graph", name)).endswith("File name too long")
    assert refusal(upcycle("check-export", source, name)).endswith("File name too long")
