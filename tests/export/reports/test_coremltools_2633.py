"""apple/coremltools#2633, #2755: `only 0-dimensional arrays can be converted to Python scalars`.

numpy 2.4 made `int(array([3]))` an error, and coremltools 9.0 does just that for every shape that
a traced model computes with.
"""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.export.planted import plant
from upcycle.errors import ExportError
from upcycle.export import coreml
from upcycle.export.coreml import export_coreml


class ComputedShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        batch, heads, queries, channels = x.shape
        return x.reshape(batch, heads * queries, channels) * 2


def test_a_computed_shape_converts_with_the_numpy_that_is_installed(tmp_path: Path) -> None:
    graph = plant(tmp_path, ComputedShape(), {"x": torch.ones(1, 2, 3, 32)})
    assert graph.decode.types[graph.decode.outputs[0]].shape == (1, 6, 32)


def test_our_requirements_keep_numpy_below_2_4() -> None:
    (numpy,) = [each for each in requires("upcycle") or [] if re.match(r"numpy\b", each)]
    assert "<2.4" in numpy


def test_numpy_2_4_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"numpy": "2.4.6", "coremltools": "9.0"}
    monkeypatch.setattr(coreml, "version", versions.__getitem__)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ExportError, match=r"cannot convert with numpy 2\.4\.6"):
        export_coreml(tmp_path, tmp_path / "a.mlpackage")
