"""huggingface/transformers#46211: a hidden size that is no multiple of the heads.

head_dim is explicit, so that the tensors are sound; the configuration's own class refuses them.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.regress.folders import set_config
from tests.tiny import convert, tiny_checkpoint
from tests.training.test_train_commands import call
from upcycle.errors import StrictError, UpcycleWarning

WEIGHTS = "model.safetensors"
WORDS = "The hidden size (64) is not a multiple of the number of attention heads (6)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six heads of 12 on a hidden size of 64."""
    folder = tiny_checkpoint(tmp_path / "source")
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = torch.randn(72, 64)
        elif name.endswith("o_proj.weight"):
            tensors[name] = torch.randn(64, 72)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    set_config(folder, num_attention_heads=6, num_key_value_heads=6, head_dim=12)
    return folder


def test_the_class_and_its_version_are_named(tmp_path: Path, source: Path) -> None:
    with pytest.warns(UpcycleWarning) as told:
        result = convert(source, tmp_path / "out", kv_heads=2)
    (words,) = [str(entry.message) for entry in told]
    assert f"transformers {version('transformers')} refuses the configuration" in words
    assert WORDS in words
    assert result.manifest.document["result"]["class"]["refused"] == words


def test_strict_refuses_it(tmp_path: Path, source: Path) -> None:
    with pytest.raises(StrictError) as caught:
        convert(source, tmp_path / "out", kv_heads=2, strict=True)
    assert WORDS in caught.value.what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["eval", "sweep", "doctor"])
def test_whatever_loads_it_says_so(tmp_path: Path, source: Path, command: str) -> None:
    """The tokenizer's loader reads the configuration too."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"source: {source}\noutput: run\nconvert: {{kv_heads: 2}}\n")
    arguments = {
        "eval": [source, source, "--out", tmp_path / "report"],
        "sweep": [source, "--kv-heads", 2],
        "doctor": [recipe],
    }
    import_module(f"upcycle.cli.{command}")
    done = call(command, *arguments[command])
    assert done.exit_code == (1 if command == "doctor" else 2), done.output
    assert WORDS in done.output
    assert "internal error" not in done.output
