"""huggingface/transformers#37785: only pickled weights, which can run code when they are loaded.

Also opendatalab/MinerU#3166, castorini/rank_llm#398 and hiyouga/LlamaFactory#8379.
"""

import pickle
from pathlib import Path

import pytest

from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import CheckpointError


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "ran")


def test_pickled_weights_are_refused_with_the_safe_way_and_never_loaded(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert "save_pretrained" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
