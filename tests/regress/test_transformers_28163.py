"""huggingface/transformers#28163: Phi checkpoints older than its KV heads have a fused tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError


def test_the_old_fused_names_are_refused_by_name(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "phi")
    path = source / "model.safetensors"
    tensors = load_file(path)
    for layer in (0, 1):
        module = f"model.layers.{layer}.self_attn"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{module}.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{module}.query_key_value.{kind}"] = torch.cat(parts)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="query_key_value") as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert "current revision" in caught.value.fix
