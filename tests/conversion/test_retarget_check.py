"""The check of a retarget passes for the right reasons, and sees a wrong tensor."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.families.retarget_sources import source_checkpoint, view_of
from upcycle.conversion.retarget_check import check_retarget
from upcycle.errors import CheckpointError
from upcycle.models.loading import model_of


@pytest.mark.parametrize("few_layers", [False, True])
def test_the_check_sees_a_wrong_tensor(
    tmp_path: Path, few_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few_layers:
        monkeypatch.setattr("upcycle.conversion.whole_model._WHOLE_MODEL", 1000)
    view = view_of(source_checkpoint(tmp_path, "pythia", dtype=torch.float16))
    exact, stored = check_retarget(view)
    assert exact.passed
    assert stored.passed
    assert stored.measured > exact.measured
    assert "first 2 layers" in exact.detail if few_layers else "all layers" in exact.detail

    name = "model.layers.1.mlp.fc1.weight"
    forgets_the_norm = replace(view.made[name], make=lambda weight, gamma: weight)
    broken = replace(view, made={**view.made, name: forgets_the_norm})
    assert not check_retarget(broken)[1].passed


def test_models_with_missing_tensors_are_not_built(tmp_path: Path) -> None:
    view = view_of(source_checkpoint(tmp_path, "gpt2"))
    tensors = {name: view.read(name) for name in view.tensors if "ln_f" not in name}
    with pytest.raises(CheckpointError, match="ln_f"):
        model_of(view.config, tensors)
