"""Exports beyond the tiny Llama: other families, and a real checkpoint."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.export.families import (
    CONTEXT,
    EXPORTED,
    REFUSED,
    REFUSED_CLASSES,
    exported_checkpoint,
    refused_checkpoint,
)
from tests.tiny import CLASSIC, FAMILIES, kv_settings, tiny_checkpoint
from upcycle.cli import export as _export  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.errors import ExportError
from upcycle.export import saving
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.program.counting import count_traffic

HYBRIDS = ("granitemoehybrid", "jamba", "lfm2_moe")  # beside those of REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSIC)
def test_supported_families_export_both_ways(family: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", family, num_key_value_heads=2)
    for attention, copies in (("qfold", 0), ("repeat-kv", 4)):
        output = tmp_path / f"{attention}.mlpackage"
        function = export_coreml(
            source, output, ExportOptions(context=64, attention=attention)
        ).function
        assert sum(tile.of_kv for tile in function.tiles) == copies


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPORTED)
def test_decoding_and_prefill_copy_no_keys_and_values(family: str, tmp_path: Path) -> None:
    source = exported_checkpoint(tmp_path / "source", family)
    result = export_coreml(
        source, tmp_path / "a.mlpackage", ExportOptions(context=CONTEXT, prefill=8)
    )
    for function in result.functions.values():
        assert not any(tile.of_kv for tile in function.tiles)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(family: str, tmp_path: Path) -> None:
    settings, message = REFUSED[family]
    source = tiny_checkpoint(tmp_path / "source", family, **settings)
    with pytest.raises(ExportError, match=message):
        export_coreml(source, tmp_path / "a.mlpackage", ExportOptions(context=CONTEXT))


@pytest.mark.parametrize("model_type", REFUSED_CLASSES)
@pytest.mark.parametrize("options", [[], ["--kv-cache", "read-only"]], ids=["state", "read-only"])
def test_attention_of_another_kind_is_refused_before_anything_is_converted(
    model_type: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = refused_checkpoint(tmp_path / "source", model_type)
    converted: list[int] = []
    monkeypatch.setattr(
        saving, "convert_decoder", lambda _decoder, queries: converted.append(queries)
    )
    arguments = ["export", str(source), str(tmp_path / "a.mlpackage"), "--context", "64", *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    message, where, fix = done.stderr.splitlines()
    assert REFUSED_CLASSES[model_type][1] in message
    assert where.startswith("  where: ")
    assert fix.startswith("  fix: export a ")
    assert converted == []
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(EXPORTED)))
def test_every_other_family_exports_or_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source", family, **kv_settings(family, 2))
    options = ExportOptions(context=CONTEXT, prefill=4)
    if family not in REFUSED and family not in HYBRIDS:
        result = export_coreml(source, tmp_path / "a.mlpackage", options)
        assert not any(tile.of_kv for tile in result.function.tiles)
        return
    monkeypatch.setattr(saving, "convert_decoder", None)  # not even begun
    with pytest.raises(ExportError):
        export_coreml(source, tmp_path / "a.mlpackage", options)


@pytest.mark.slow
def test_the_shapes_of_a_published_model_copy_960_mib(tmp_path: Path) -> None:
    """EXAONE 4.0 1.2B's attention at 4,096 tokens, with thin weights around it."""
    thin = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    }
    others = {"sliding_window": None, "layer_types": ["full_attention"] * 30}
    config = AutoConfig.for_model("exaone4", **thin, **others)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    function = export_coreml(
        tmp_path / "source",
        tmp_path / "a.mlpackage",
        ExportOptions(context=4096, attention="repeat-kv"),
    ).function
    tiles = [tile for tile in function.tiles if tile.of_kv]
    assert (len(tiles), sum(tile.nbytes for tile in tiles)) == (60, 960 * 2**20)
    traffic = count_traffic(function)
    assert (traffic.kv_read, traffic.copies) == (240 * 2**20, 2 * 960 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "copies"), [("qfold", 0), ("repeat-kv", 60)])
def test_smollm2(smollm2: Path, tmp_path: Path, attention: str, copies: int) -> None:
    result = export_coreml(
        smollm2, tmp_path / "a.mlpackage", ExportOptions(context=512, attention=attention)
    )
    tiles = [tile for tile in result.function.tiles if tile.of_kv]
    assert len(tiles) == copies
    assert sum(tile.nbytes for tile in tiles) == copies * 9 * 512 * 64 * 2
    assert result.function.histogram["linear"] == 30 * 7 + 1
