"""Tied weights are lost or come untied (huggingface/accelerate#2807, #2684, transformers#30202).

Also huggingface/transformers#43159 and safetensors#265.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.training.runs import tiny_run


@pytest.mark.parametrize("stores_both", [False, True])
def test_tied_weights_stay_tied(tmp_path: Path, stores_both: bool) -> None:
    run = tiny_run(tmp_path, tie_word_embeddings=True)
    path = run.student / "model.safetensors"
    names = set(load_file(path))
    assert "lm_head.weight" not in names
    if stores_both:
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})
        names.add("lm_head.weight")
    result = run.train(steps=1)
    stored = load_file(result.output / "model.safetensors")
    assert set(stored) == names
    model = AutoModelForCausalLM.from_pretrained(result.output)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, stored["model.embed_tokens.weight"])
    if stores_both:
        assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
