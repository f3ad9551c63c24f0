"""safetensors/safetensors#98, #202 and #304: tied weights ("Some tensors share memory").

Also NVIDIA-NeMo/Megatron-Bridge#919 and huggingface/transformers#33688 and #33807. Tensors are
copied as bytes by name, so that none is invented and none is lost.
"""

from pathlib import Path

import torch

from tests.regress.folders import load, logits
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint


def test_a_tied_head_is_neither_invented_nor_untied(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", tie_word_embeddings=True)
    before = Checkpoint.open(source).tensors
    assert "lm_head.weight" not in before
    for kv_heads in (8, 2):
        folder = tmp_path / str(kv_heads)
        convert(source, folder, kv_heads=kv_heads)
        assert Checkpoint.open(folder).tensors.keys() == before.keys()
        model = load(folder)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits(load(tmp_path / "8")), logits(load(source)))
