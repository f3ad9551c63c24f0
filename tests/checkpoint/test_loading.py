"""A model is loaded whole, or refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from upcycle.errors import CheckpointError, DeviceError
from upcycle.models.loading import choose_device, load_model, load_tokenizer


def test_weights_and_dtype_are_those_asked_for(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, weights[name].float()), name


def test_a_missing_tensor_is_refused_not_drawn_at_random(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "source")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, dtype=torch.float32)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "source")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="tokenizer does not load"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["abacus", "cuda", "mps", "cuda:0", ""])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="is not available") as caught:
        choose_device(name)
    assert caught.value.fix == "choose one of auto, cpu"
    with pytest.raises(DeviceError):
        load_model(Path("missing"), dtype=torch.float32, device=name)


@pytest.mark.parametrize(
    ("present", "best"), [({"cuda", "mps"}, "cuda"), ({"mps"}, "mps"), (set(), "cpu")]
)
def test_auto_takes_the_best_device(
    present: set[str], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in present)
    assert choose_device("auto") == choose_device(best) == best
