"""The plot of what each layer lost comes from the conversion's own manifest."""

import json
from pathlib import Path

from tests.report.example import document, typed
from tests.tiny import convert, tiny_checkpoint
from upcycle.report.render import render_html

HEADING = "What merging left behind, by layer"


def test_a_calibrated_conversion_is_drawn(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i * i % 313}" for i in range(900)))
    source = tiny_checkpoint(tmp_path / "source")
    shown = document()
    for name, options in {"mean": {}, "lowrank": {"calibration": [text], "refine": 2}}.items():
        tokens = {"calibration_tokens": 512} if options else {}
        result = convert(source, tmp_path / name, kv_heads=2, **options, **tokens)
        shown["provenance"][1]["manifest"] = json.loads(json.dumps(result.manifest.document))
        html = render_html(typed(shown))
        assert (HEADING in html) == (name == "lowrank")
        assert ("output error before refining" in html) == (name == "lowrank")


def test_residuals_are_fractions(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 400)
    source = tiny_checkpoint(tmp_path / "source")
    result = convert(
        source, tmp_path / "out", kv_heads=2, calibration=[text], calibration_tokens=512
    )
    for layer in result.manifest.document["result"]["layers"]:
        assert 0 <= layer["residual"]["keys"] <= 1
        assert 0 <= layer["residual"]["values"] <= 1
        assert layer["refinement"] is None
