"""verl-project/verl#4761: a merged folder whose MLP was left as `base_layer` and `lora_A`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError, StrictError, UpcycleWarning
from upcycle.planning import plan

WEIGHTS = "model.safetensors"


def wrap(folder: Path, module: str) -> Path:
    """Name the weights of a module as PEFT does while the adapter is not merged."""
    tensors = load_file(folder / WEIGHTS)
    for layer in range(2):
        name = f"model.layers.{layer}.{module}"
        weight = tensors.pop(f"{name}.weight")
        tensors[f"{name}.base_layer.weight"] = weight
        tensors[f"{name}.lora_A.default.weight"] = torch.zeros(4, weight.shape[1])
        tensors[f"{name}.lora_B.default.weight"] = torch.zeros(weight.shape[0], 4)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_an_mlp_is_told_before_it_is_copied(tmp_path: Path) -> None:
    source = wrap(tiny_checkpoint(tmp_path / "source"), "mlp.up_proj")
    assert plan(source, kv_heads=2).num_key_value_heads == 2
    with pytest.warns(UpcycleWarning) as told:
        convert(source, tmp_path / "out", kv_heads=2)
    missing, unexpected = [str(entry.message) for entry in told]
    assert "2 missing, which loading fills with random numbers" in missing
    assert "model.layers.0.mlp.up_proj.weight [96, 64]" in missing
    assert "6 unexpected, which loading ignores" in unexpected
    assert "is a part of a LoRA that was never merged" in unexpected
    assert "merge_and_unload()" in unexpected
    with pytest.raises(StrictError, match="6 unexpected"):
        convert(source, tmp_path / "strict", kv_heads=2, strict=True)


def test_an_attention_is_refused(tmp_path: Path) -> None:
    source = wrap(tiny_checkpoint(tmp_path / "source"), "self_attn.v_proj")
    with pytest.raises(CheckpointError, match="LoRA that was never merged") as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert "merge_and_unload()" in caught.value.fix
