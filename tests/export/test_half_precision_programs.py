"""Exported programs of models with a large residual stream, run in fp16 arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.export.test_residual_in_half_precision import grow, stream_of
from tests.tiny import tiny_model
from upcycle.export import loading
from upcycle.export.coreml import export_coreml
from upcycle.export.masks import additive_mask
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.program.reading import read_graph
from upcycle.program.signature import CAUSAL_MASK, DECODE, INPUT_IDS, LOGITS, POSITION

CONTEXT = 32
TOKENS = torch.arange(3, 19)[None] * 13 % 260


def checkpoint(folder: Path, peak: float) -> tuple[Path, Tensor]:
    """A model whose residual stream reaches `peak`, and its logits [N, vocabulary]."""
    model = tiny_model("llama", num_key_value_heads=2)
    grow(model, peak)
    stream, _ = stream_of(model)
    assert 0.5 * peak < stream.peak < 2 * peak
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(TOKENS).logits[0]


def decoded(package: Path) -> Tensor:
    """The program's logits, token by token, every operation rounded to fp16."""
    interpreter = Interpreter(Loaded(read_graph(package)), half=True)
    rows = []
    for position, token in enumerate(TOKENS[0]):
        inputs = {
            INPUT_IDS: token.reshape(1, 1).int(),
            POSITION: torch.tensor([position], dtype=torch.int32),
            CAUSAL_MASK: additive_mask(position, 1, CONTEXT),
        }
        rows.append(interpreter.run(DECODE, inputs)[LOGITS][0, 0].float())
    return torch.stack(rows)


@pytest.mark.parametrize("peak", [400.0, 4e5])
def test_a_large_stream_is_right_in_fp16(peak: float, tmp_path: Path) -> None:
    source, expected = checkpoint(tmp_path / "source", peak)
    package = export_coreml(
        source, tmp_path / "a.mlpackage", ExportOptions(context=CONTEXT)
    ).package
    found = decoded(package)
    assert (found - expected).abs().max() < 0.01 * (expected.max() - expected.min())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("peak", "without"), [(400.0, "guard_norms"), (2e5, "fit_residual")])
def test_it_is_wrong_without(
    peak: float, without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(model: nn.Module, *_: Any) -> None:
        pass

    monkeypatch.setattr(loading, without, leave)
    source, expected = checkpoint(tmp_path / "source", peak)
    package = export_coreml(
        source, tmp_path / "a.mlpackage", ExportOptions(context=CONTEXT)
    ).package
    difference = (decoded(package) - expected).abs().max()
    assert not difference < 0.1 * (expected.max() - expected.min())
