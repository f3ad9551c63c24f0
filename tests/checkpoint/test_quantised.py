"""Quantised checkpoints are refused by what is seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.quantised import quantised_tensors, refuse_quantised
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import FamilyError

Q = "model.layers.0.self_attn.q_proj"
SCHEMES = {
    "GPTQ or AWQ": [f"{Q}.qweight", f"{Q}.qzeros", f"{Q}.scales", f"{Q}.g_idx"],
    "bitsandbytes": [f"{Q}.weight.absmax", f"{Q}.weight.quant_state.bitsandbytes__nf4"],
    "compressed-tensors": [f"{Q}.weight_packed", f"{Q}.weight_scale", f"{Q}.weight_shape"],
    "FP8 or INT8": [f"{Q}.weight", f"{Q}.weight_scale_inv"],
    "MXFP4": ["model.layers.0.mlp.experts.gate_up_proj_blocks"],
    "HQQ": [f"{Q}.W_q", f"{Q}.scale"],
    "quanto": [f"{Q}.weight._data", f"{Q}.weight._scale"],
    "torchao": [f"{Q}._weight_qdata", f"{Q}._weight_scale"],
    "AQLM or VPTQ": [f"{Q}.codes", f"{Q}.codebooks"],
    "MLX": [f"{Q}.weight", f"{Q}.scales", f"{Q}.biases"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)


def edit(folder: Path, **changes: Any) -> Checkpoint:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(("scheme", "names"), SCHEMES.items())
def test_a_scheme_is_known_by_its_tensors(folder: Path, scheme: str, names: list[str]) -> None:
    found = quantised_tensors(names)
    assert found is not None
    assert found[0] == scheme
    weights = load_file(folder / "model.safetensors")
    weights.update({name: torch.ones(2) for name in names})
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(FamilyError, match=r"quantised \(.*\): it has .*layers\.0") as caught:
        refuse_quantised(Checkpoint.open(folder))
    assert scheme in caught.value.what
    assert any(name in caught.value.what for name in found[1])


def test_whole_weights_are_not_refused(folder: Path) -> None:
    refuse_quantised(edit(folder, quantization_config=None))
    assert (
        quantised_tensors(["model.norm.scale", "lm_head.weight", "model.rotary.inv_freq"]) is None
    )


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown method"),
        ({"quantization_config": "odd"}, "unknown method"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "unknown method"),
    ],
)
def test_a_configuration_that_says_so_is_refused(
    folder: Path, changes: dict[str, Any], method: str
) -> None:
    with pytest.raises(FamilyError, match=f"quantised \\({method}\\)") as caught:
        refuse_quantised(edit(folder, **changes))
    assert next(iter(changes)) in caught.value.where
