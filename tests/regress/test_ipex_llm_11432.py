"""intel/ipex-llm#11432: quantised projections have no `weight` to edit.

Also Lightning-AI/litgpt#513 and #771, huggingface/peft#2321 and #2105, modelscope/ms-swift#780 and
unslothai/unsloth#1601.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.regress.folders import set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import UpcycleError

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
MODULE = WEIGHT.removesuffix("weight")
SCHEMES = {
    "gptq": {
        f"{MODULE}qweight": torch.zeros(8, 64, dtype=torch.int32),
        f"{MODULE}qzeros": torch.zeros(1, 8, dtype=torch.int32),
        f"{MODULE}scales": torch.ones(1, 64, dtype=torch.float16),
    },
    "bitsandbytes": {
        WEIGHT: torch.zeros(2048, 1, dtype=torch.uint8),
        f"{WEIGHT}.absmax": torch.zeros(64, dtype=torch.uint8),
    },
    "fp8": {
        WEIGHT: torch.zeros(64, 64).to(torch.float8_e4m3fn),
        f"{WEIGHT}_scale_inv": torch.ones(1, 1),
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_tensors_are_named_without_any_word_in_the_config(
    tmp_path: Path, scheme: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    del tensors[WEIGHT]
    added = SCHEMES[scheme]
    save_file({**tensors, **added}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UpcycleError, match="quantised") as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert any(name in str(caught.value) for name in added)
    assert not (tmp_path / "out").exists()


def test_a_quantised_config_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UpcycleError, match="awq"):
        convert(source, tmp_path / "out", kv_heads=2)
