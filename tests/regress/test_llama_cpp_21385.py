"""ggml-org/llama.cpp#21385: key biases of Qwen2.5 that reach hundreds beside a median near 20."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.regress.folders import load, logits
from tests.tiny import convert, tiny_checkpoint

NAME = "model.layers.0.self_attn.k_proj.bias"


def test_spikes_are_averaged_in_full_precision_and_not_clipped(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", dtype=torch.bfloat16)
    path = source / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(0)
    heads = (1000 + 300 * torch.randn(8, 8)).bfloat16()
    tensors[NAME] = heads.flatten()
    save_file(tensors, path, metadata={"format": "pt"})
    convert(source, tmp_path / "out", kv_heads=2)

    merged = load_file(tmp_path / "out" / "model.safetensors")[NAME]
    groups = heads.view(2, 4, 8)
    assert torch.equal(merged, groups.double().mean(1).bfloat16().flatten())
    in_storage = (groups[:, 0] + groups[:, 1] + groups[:, 2] + groups[:, 3]) / 4
    assert not torch.equal(merged, in_storage.flatten())
    assert merged.max() > 1000
    assert logits(load(tmp_path / "out")).isfinite().all()
