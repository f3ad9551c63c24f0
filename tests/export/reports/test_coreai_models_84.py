"""apple/coreai-models#84: prefill of more than 16 tokens into states differs from run to run.

Seen on macOS with dynamic shapes; calls of up to 16 tokens were steady.
"""

from pathlib import Path

import pytest

from upcycle.export.coreml import ExportResult
from upcycle.export.risks import device_notes
from upcycle.options.export import ExportOptions
from upcycle.program.graph import Graph
from upcycle.program.noted import DecoderShape, check_manifest

SHAPE = DecoderShape(
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    value_head_dim=64,
    num_linears=15,
    masks={"causalMask": None},
)


@pytest.mark.parametrize(
    ("prefill", "kv_cache", "told"),
    [(None, "state", False), (16, "state", False), (17, "state", True), (17, "read-only", False)],
)
def test_a_longer_prefill_is_told(prefill: int | None, kv_cache: str, told: bool) -> None:
    options = ExportOptions(prefill=prefill, kv_cache=kv_cache)
    document = {"options": options.noted(), "result": {"decoder": SHAPE.document}}
    manifest = check_manifest(document, "")
    result = ExportResult(Path("model.aimodel"), options, Graph({}, {}, "main"), manifest)
    notes = device_notes(result, core_ai=True)
    assert [f"prefill of {prefill} tokens" in note for note in notes] == [True] * told
    assert all("apple/coreai-models#84" in note for note in notes)
