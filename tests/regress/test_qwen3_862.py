"""QwenLM/Qwen3#862: `num_key_value_heads` of a grouped model changed by editing the config."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.regress.folders import load, logits
from tests.tiny import convert, tiny_checkpoint
from upcycle.errors import PlanError
from upcycle.kvcache.layout import attention_kind

NAME = "model.layers.1.self_attn.k_proj.bias"


@pytest.fixture(name="source")
def grouped(tmp_path: Path) -> Path:
    return tiny_checkpoint(
        tmp_path / "source", "qwen2", num_attention_heads=4, num_key_value_heads=2
    )


def test_two_kv_heads_become_one_of_all_four_query_heads(tmp_path: Path, source: Path) -> None:
    result = convert(source, tmp_path / "out", kv_heads=1)
    assert attention_kind(result.plan.source_shape, 2) == "GQA"
    assert attention_kind(result.plan.target_shape, 1) == "MQA"
    before = load_file(source / "model.safetensors")[NAME].view(2, -1)
    after = load_file(tmp_path / "out" / "model.safetensors")[NAME]
    torch.testing.assert_close(after, before.mean(0))
    assert load(tmp_path / "out").model.layers[0].self_attn.num_key_value_groups == 4


def test_three_are_refused_with_the_list(tmp_path: Path, source: Path) -> None:
    with pytest.raises(PlanError, match="3 KV heads from 4 query heads and 2 KV heads") as caught:
        convert(source, tmp_path / "out", kv_heads=3)
    assert caught.value.fix == "choose one of 1, 2, 4"


def test_four_are_exact(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", kv_heads=4)
    raised = load(tmp_path / "out")
    assert raised.config.num_key_value_heads == 4
    torch.testing.assert_close(logits(raised), logits(load(source)), rtol=1e-5, atol=1e-5)
