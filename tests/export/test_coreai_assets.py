"""Saved assets, run by Apple's own CPU runtime. Needs the packages of the extra `coreai`."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.staging import check_output
from upcycle.errors import ExportError
from upcycle.export.coreai.exporting import export_coreai
from upcycle.export.coreml import ExportResult
from upcycle.options.export import ExportOptions
from upcycle.parity.asset import Asset, asset_runner
from upcycle.parity.check import check_export
from upcycle.program.coreai import read_program

pytestmark = pytest.mark.slow
LAYERS, HEADS, GROUPS, HEAD_DIM, CONTEXT = 2, 8, 2, 8, 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coreai") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=GROUPS)


@pytest.fixture(scope="module")
def exported(source: Path) -> ExportResult:
    return export_coreai(
        source, source.parent / "model.aimodel", ExportOptions(context=CONTEXT, prefill=16)
    )


@pytest.mark.parametrize("kv_cache", ["state", "read-only"])
@pytest.mark.parametrize("model", ["demo", "exaone4"])
def test_32_steps_give_the_models_tokens(model: str, kv_cache: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / model
    if model == "demo":
        convert(ROOT / "recipes" / "demo-source", checkpoint, kv_heads=2)
    else:
        tiny_checkpoint(checkpoint, model, num_key_value_heads=GROUPS)
    output = tmp_path / "model.aimodel"
    result = export_coreai(
        checkpoint, output, ExportOptions(context=CONTEXT, kv_cache=kv_cache), dtype="float32"
    )
    assert not [tile for tile in result.function.tiles if tile.of_kv]
    (found,) = check_export(checkpoint, output, tokens=16).arithmetics
    assert found.text.agreeing == found.text.positions == 32
    assert found.text.relative < 1e-5
    assert found.end.relative < 1e-5


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"prefill": 16, "kv_cache": "read-only"}),
        ("exaone4", {"prefill": 16}),
        ("gemma2", {"prefill": 16, "argmax": True}),
        ("phi", {}),
        ("qwen2", {"conv": True, "split_head": 4}),
    ],
)
def test_half_precision_passes_the_check(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "source", family, num_key_value_heads=GROUPS)
    output = tmp_path / "model.aimodel"
    export_coreai(checkpoint, output, ExportOptions(context=CONTEXT, **options))
    check = check_export(checkpoint, output, tokens=32)
    assert check.passed
    assert check.prefilled == (32 if "prefill" in options else 0)
    (found,) = check.arithmetics
    assert found.text.maximum > 0  # it is not the checkpoint that was run
    assert found.text.relative < 1e-2


def test_repeat_kv_copies_keys_and_values(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.aimodel"
    result = export_coreai(
        source, output, ExportOptions(context=CONTEXT, attention="repeat-kv"), dtype="float32"
    )
    copies = [tile.shape for tile in result.function.tiles if tile.of_kv]
    assert copies == [(1, GROUPS, HEADS // GROUPS, CONTEXT, HEAD_DIM)] * 2 * LAYERS
    (found,) = check_export(source, output, tokens=8).arithmetics
    assert found.text.relative < 1e-5


def test_the_program_has_the_contract_of_packages(exported: ExportResult) -> None:
    assert exported.functions.keys() == {"main", "prefill"}
    states = dict.fromkeys(("keyCache", "valueCache"), (LAYERS, GROUPS, CONTEXT, HEAD_DIM))
    for name, queries in (("main", 1), ("prefill", 16)):
        function = exported.functions[name]
        assert {name: state.shape for name, state in function.states.items()} == states
        assert function.state_writes == {"keyCache": LAYERS, "valueCache": LAYERS}
        assert {
            key: (function.types[key].shape, function.types[key].dtype) for key in function.inputs
        } == {
            "inputIds": ((1, queries), "int32"),
            "position": ((1,), "int32"),
            "causalMask": ((1, 1, queries, CONTEXT), "float16"),
        }
        (logits,) = function.outputs[-1:]
        assert function.types[logits].shape == (1, queries, 260)


def test_functions_share_their_weights(
    exported: ExportResult, source: Path, tmp_path: Path
) -> None:
    alone = export_coreai(source, tmp_path / "alone.aimodel", ExportOptions(context=CONTEXT))
    sizes = [(result.package / "main.mlirb").stat().st_size for result in (alone, exported)]
    weights = 2 * 260 * 64 * 2  # embedding and head alone
    assert sizes[1] - sizes[0] < weights / 2


def test_an_asset_says_what_made_it(exported: ExportResult) -> None:
    asset = Asset.read(exported.package)
    assert asset.manifest.document == exported.manifest.document
    options = asset.manifest.options.document
    assert options["target"] == "coreai"
    assert options["dtype"] == "float16"
    assert (asset.context, options["prefill"]) == (CONTEXT, 16)
    check_output(exported.package, overwrite=True)  # it bears the mark of our outputs


def test_the_asset_of_another_checkpoint_fails_the_check(
    exported: ExportResult, tmp_path: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "other", seed=1, num_key_value_heads=GROUPS)
    check = check_export(other, exported.package, tokens=16)
    assert not check.passed
    assert check.arithmetics[0].text.agreeing < 16


def test_nothing_is_printed(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model.aimodel"
    export_coreai(source, output, ExportOptions(context=CONTEXT))
    check_export(source, output, tokens=4)
    assert capfd.readouterr() == ("", "")


def test_a_runtime_that_crashes_is_an_error(exported: ExportResult, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"runtime ended while running none\.aimodel: SIG"):
        asset_runner(tmp_path / "none.aimodel").__enter__()
    with (
        asset_runner(exported.package) as runner,
        pytest.raises(ExportError, match=r"exit code 1.*inputIds.*\n.*function main"),
    ):
        runner.run("main", {})


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff\xfe"])
def test_damaged_metadata_are_refused(
    exported: ExportResult, tmp_path: Path, content: bytes | None
) -> None:
    copy = shutil.copytree(exported.package, tmp_path / "copy.aimodel")
    metadata = copy / "metadata.json"
    metadata.write_bytes(metadata.read_bytes()[:100] if content is None else content)
    with pytest.raises(ExportError, match=r"Core AI cannot open .*\n  where: .*metadata\.json"):
        Asset.read(copy)


def test_damaged_assets_are_refused(exported: ExportResult, tmp_path: Path) -> None:
    """Apple's parser would end the process."""
    copy = shutil.copytree(exported.package, tmp_path / "copy.aimodel")
    program = copy / "main.mlirb"
    program.write_bytes(program.read_bytes()[:-1])
    with pytest.raises(ExportError, match=r"main\.mlirb is damaged"):
        Asset.read(copy)
    (copy / "main.hash").unlink()
    with pytest.raises(ExportError, match=r"has no main\.hash"):
        read_program(copy)
    (copy / "upcycle.json").unlink()
    with pytest.raises(ExportError, match="was not made by `upcycle export`"):
        Asset.read(copy)
