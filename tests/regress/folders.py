"""What several regression tests do with a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.tiny import byte_tokenizer

IDS = torch.tensor([[5, 9, 200, 31, 77, 5, 9, 120, 3, 8]])


def set_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`; None removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2))


def get_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, use_cache=False).logits
    return found


def save_random(folder: Path, config: PretrainedConfig) -> Path:
    """A checkpoint of a class, its weights and norms random enough that no mistake hides."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
            if parameter.ndim == 1:
                parameter.add_(1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def pooled(heads: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Replace each of [K, ...] by the mean of its contiguous group; the shape stays."""
    groups = heads.double().unflatten(0, (kv_heads, -1))
    mean = groups.mean(1, keepdim=True).expand_as(groups)
    return mean.flatten(0, 1).to(heads.dtype)
