"""Folders of other programs are refused by name, with a way out that works."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_checkpoint, tiny_model
from upcycle.checkpoint.foreign import refuse_without_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError
from upcycle.models.loading import load_model

KINDS = [
    (["pytorch_model.bin", "config.json"], "pickled weights", "weights_only=True"),
    (["pytorch_model.bin.index.json"], "pickled weights", "sandbox"),
    (["model.pt"], "pickled weights", 'save_pretrained("safe")'),
    (["model.Q4_K_M.gguf"], "GGUF", "gguf_file"),
    (["consolidated.00.pth", "params.json"], "Meta's own layout", "n_kv_heads"),
    (["consolidated.safetensors", "params.json"], "Mistral's own layout", "config.json"),
    (["model-00001-of-00002.safetensors"], "shards without their index", "index.json"),
    (["weights.safetensors"], "under another name", "rename it"),
    (["adapter_config.json", "adapter_model.safetensors"], "an adapter", "merge_and_unload"),
    (["adapter_model.bin"], "an adapter", "merge_and_unload"),
    (["zero_to_fp32.py", "latest", "model.pt"], "a training run", "zero_to_fp32"),
    (["model_index.json"], "diffusers", "text_encoder"),
    (["modules.json"], "sentence-transformers", "causal language models"),
    (["tf_model.h5"], "TensorFlow or Flax", "transformers 4"),
    (["flax_model.msgpack"], "TensorFlow or Flax", "transformers 4"),
    (["model.onnx"], "an export", "that was exported"),
    (["model.mlpackage"], "an export", "that was exported"),
]


@pytest.mark.parametrize(("files", "what", "fix"), KINDS, ids=lambda value: str(value)[:40])
def test_a_folder_of_another_program_is_refused_by_name(
    tmp_path: Path, files: list[str], what: str, fix: str
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"not even opened")
    with pytest.raises(CheckpointError, match=what) as caught:
        Checkpoint.open(tmp_path)
    assert fix in caught.value.fix
    assert len(str(caught.value).splitlines()) == 3
    if "python -c" in caught.value.fix:
        _, code = caught.value.fix.split("python -c ")
        (code,) = shlex.split(code)
        compile(code, "the fix", "exec")


def test_an_adapter_beside_whole_weights_is_refused(tmp_path: Path) -> None:
    """Loading the folder with peft installed would add the adapter to the weights."""
    folder = tiny_checkpoint(tmp_path / "source")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="an adapter"):
        Checkpoint.open(folder)


def test_an_empty_folder_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no model\.safe"):
        Checkpoint.open(tmp_path)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot list"):
        refuse_without_model(tmp_path / "gone", "model")


def test_the_command_for_pickled_weights_makes_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "tést" $HOME {}'
    folder.mkdir()
    model = tiny_model(num_hidden_layers=1)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    command = shlex.quote(sys.executable) + " -c" + caught.value.fix.split("python -c")[1]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    assert Checkpoint.open(tmp_path / "safe").tensors
    loaded = load_model(tmp_path / "safe", dtype=torch.float32).state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded[key], tensor), key


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no file named model\.safetensors"):
        load_model(tmp_path, dtype=torch.float32)
