"""Tiny checkpoints with the blocks of multi-token prediction that released models have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.regress.folders import set_config
from tests.tiny import tiny_checkpoint

WEIGHTS = "model.safetensors"
LAST = "model.layers.1."


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder with one file."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})


def with_predictor(
    folder: Path,
    model_type: str = "qwen3",
    block: str = "mtp.layers.0",
    *,
    others: Mapping[str, tuple[int, ...]] | None = None,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A checkpoint with the last layer's tensors once more as `block`, with other numbers.

    Args:
        folder: where to make it.
        model_type: its class.
        block: the path that takes the place of the last decoder layer's.
        others: shapes of further tensors by name.
        config: keys of `config.json` to set; None removes one.
        settings: of the tiny model.
    """
    tiny_checkpoint(folder, model_type, **{"num_key_value_heads": 4, **settings})

    def add(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in [name for name in weights if name.startswith(LAST)]:
            noise = torch.randn(weights[name].shape, generator=generator) * 0.1
            weights[f"{block}.{name.removeprefix(LAST)}"] = weights[name] + noise
        for name, shape in (others or {}).items():
            weights[name] = torch.randn(shape, generator=generator)

    rewrite(folder, add)
    set_config(folder, **(config or {}))
    return folder


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every stored tensor's shape by name."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    return found


def manifest_of(folder: Path) -> dict[str, Any]:
    """The content of `upcycle.json`."""
    manifest: dict[str, Any] = json.loads((folder / "upcycle.json").read_text())
    return manifest
