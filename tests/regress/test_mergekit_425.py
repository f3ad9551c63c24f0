"""arcee-ai/mergekit#425: tensors of an embedding or MLP that the class has in another shape."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import StrictError, UpcycleWarning

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.embed_tokens.weight", (264, 64), "is [264, 64], the class has [260, 64]"),
        ("lm_head.weight", (256, 64), "is [256, 64], the class has [260, 64]"),
        ("model.layers.1.mlp.gate_proj.weight", (80, 64), "is [80, 64], the class has [96, 64]"),
        ("model.norm.weight", (1,), "is [1], the class has [64]"),
    ],
)
def test_each_is_named_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", tie_word_embeddings=False)
    tensors = load_file(source / WEIGHTS)
    tensors[name] = torch.ones(shape)
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(StrictError) as caught:
        convert(source, tmp_path / "strict", kv_heads=2, strict=True)
    assert f"1 mismatched: {name} {words}" in caught.value.what
    with pytest.warns(UpcycleWarning, match="1 mismatched"):
        convert(source, tmp_path / "out", kv_heads=2)
    # What is copied stays as it is, wrong or not.
    assert load_file(tmp_path / "out" / WEIGHTS)[name].shape == shape
