"""arcee-ai/mergekit#316: merges computed in the storage dtype lose what the mean needs.

In bf16, 1 + 1.0078125 + 1.0078125 + 1.0078125 rounds to 4 at every step, a mean of 1.0; the exact
mean, 1.005859375, is nearest to 1.0078125.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint

NAME = "model.layers.0.self_attn.k_proj.weight"


def test_bf16_heads_are_averaged_exactly_and_stored_as_bf16(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    weights = load_file(source / "model.safetensors")
    heads = weights[NAME].view(8, -1)
    heads[:] = 1.0078125
    heads[::4] = 1.0
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", kv_heads=2)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert (merged[NAME] == 1.0078125).all()
    before, after = Checkpoint.open(source).tensors, Checkpoint.open(tmp_path / "out").tensors
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in before.items()}
