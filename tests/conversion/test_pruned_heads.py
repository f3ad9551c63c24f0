"""Copies beside heads that were pruned, and copies found on the poorest text: nothing is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conversion.test_calibrated import OPTIONS, TEXT, logits, relative
from tests.tiny import convert, tiny_checkpoint

PRUNED = [3, 7]  # the last of each group
HEADS = 8


def change_attention(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Replace the projections of a folder by those that `change` makes of [heads, d, D] each."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rows = tensor.T if kind == "o_proj" else tensor
            heads = torch.unflatten(rows, 0, (HEADS, -1))
            new = change(kind, heads.clone()).flatten(0, 1)
            tensors[name] = (new.T if kind == "o_proj" else new).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def all_of_it(kind: str, heads: Tensor) -> Tensor:
    heads[PRUNED] = 0
    return heads


def its_output(kind: str, heads: Tensor) -> Tensor:
    """Keys that are no copies, of heads whose outputs nothing reads."""
    if kind == "o_proj":
        heads[PRUNED] = 0
    if kind == "k_proj":
        generator = torch.Generator().manual_seed(0)
        heads[PRUNED] = torch.randn(heads[PRUNED].shape, generator=generator) * 0.3
    return heads


def the_whole_group(kind: str, heads: Tensor) -> Tensor:
    heads[HEADS // 2 :] = 0
    return heads


@pytest.mark.parametrize("prune", [all_of_it, its_output, the_whole_group])
@pytest.mark.parametrize("name", ["llama", "qwen3", "cohere"])
def test_pruned_heads_do_not_bend_the_copies_beside_them(
    tmp_path: Path, name: str, prune: Callable[[str, Tensor], Tensor]
) -> None:
    raised, text = tmp_path / "raised", tmp_path / "text.txt"
    text.write_text(TEXT)
    convert(tiny_checkpoint(tmp_path / "few", name, num_key_value_heads=2), raised, kv_heads=8)
    change_attention(raised, prune)
    convert(raised, tmp_path / "out", kv_heads=2, calibration=[text], **OPTIONS)
    assert relative(logits(tmp_path / "out"), logits(raised)) <= 1e-5


def test_one_token_is_enough_to_find_the_copies(tmp_path: Path) -> None:
    raised, text = tmp_path / "raised", tmp_path / "text.txt"
    text.write_text("a" * 2000)
    convert(tiny_checkpoint(tmp_path / "few", num_key_value_heads=2), raised, kv_heads=8)
    change_attention(raised, lambda kind, heads: heads[[0, 4, 1, 5, 2, 6, 3, 7]])
    convert(raised, tmp_path / "out", kv_heads=2, calibration=[text], grouping="search", **OPTIONS)
    assert relative(logits(tmp_path / "out"), logits(raised)) <= 1e-5
