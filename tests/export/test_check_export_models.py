"""`check-export` on other families and on a real checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.export.families import CONTEXT, EXPORTED, exported_checkpoint
from tests.tiny import convert
from upcycle.export.coreml import export_coreml
from upcycle.models.loading import load_model
from upcycle.options.export import ExportOptions
from upcycle.parity.check import check_export, compare_program, program_reference
from upcycle.parity.exported import Program

TOKENS = torch.arange(48) * 7919 % 251


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPORTED)
def test_every_exported_family_is_its_model(family: str, tmp_path: Path) -> None:
    source = exported_checkpoint(tmp_path / "source", family)
    output = tmp_path / "a.mlpackage"
    program = Program.read(
        export_coreml(source, output, ExportOptions(context=CONTEXT, prefill=16)).package
    )
    model = load_model(source, dtype=torch.float32, attention="eager")
    result = compare_program(program_reference(model, program, TOKENS), program, TOKENS)
    assert [check for check in result.checks if not check.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_smollm2_and_its_multi_query_conversion(
    smollm2: Path, tmp_path: Path, kv_heads: int
) -> None:
    source = tmp_path / "converted"
    convert(smollm2, source, kv_heads=kv_heads)
    packages = [tmp_path / f"{attention}.mlpackage" for attention in ("qfold", "repeat-kv")]
    for package in packages:
        export_coreml(
            source, package, ExportOptions(context=256, prefill=64, attention=package.stem)
        )
    result = check_export(source, packages[0], against=packages[1])
    assert [check for check in result.checks if not check.passed] == []
    assert (result.tokens, result.prefilled) == (128, 64)
