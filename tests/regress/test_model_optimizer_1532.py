"""NVIDIA/Model-Optimizer#1532, NVIDIA-NeMo/Megatron-Bridge#5495, vllm-project/vllm#34888.

Layers of multi-token prediction that are stored behind the decoder's last: tools read them as a
wrong number of layers, lose them, or look for as many as the configuration says and find others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from tests.predictors import shapes, with_predictor
from tests.regress.folders import get_config, load, logits, pooled
from tests.tiny import convert
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError

BEHIND = "model.layers.2"
PARTS = {f"{BEHIND}.eh_proj.weight": (64, 128), f"{BEHIND}.shared_head.norm.weight": (64,)}
SAID: dict[str, dict[str, Any]] = {
    "1": {"num_nextn_predict_layers": 1},
    "0": {"num_nextn_predict_layers": 0},
    "missing": {"num_nextn_predict_layers": None, "num_mtp_layers": None},
}


@pytest.mark.parametrize("said", SAID)
def test_a_layer_behind_the_last_is_pooled_like_the_others(tmp_path: Path, said: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    with_predictor(source, "glm4_moe", BEHIND, config=SAID[said])
    convert(source, out, kv_heads=2)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    name = f"{BEHIND}.self_attn.v_proj.weight"
    heads = before[name].unflatten(0, (4, -1))
    assert torch.equal(after[name], pooled(heads, 2)[::2].flatten(0, 1))
    assert verify(source, out).passed
    assert {**get_config(source), "num_key_value_heads": 2} == get_config(out)
    reports = [
        AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]
        for folder in (source, out)
    ]
    assert reports[0] == reports[1]


def test_it_can_be_left_out(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    with_predictor(source, "glm4_moe", BEHIND, others=PARTS, config=SAID["1"])
    convert(source, out, kv_heads=2, drop_extra_attention=True)
    assert set(shapes(out)) == {name for name in shapes(source) if not name.startswith(BEHIND)}
    assert get_config(out)["num_nextn_predict_layers"] == 0
    assert verify(source, out).passed
    logits(load(out))


def test_the_decoder_s_class_loads_it_with_the_new_configuration(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    with_predictor(source, "glm4_moe", BEHIND, others=PARTS, config=SAID["1"])
    convert(source, out, kv_heads=4)  # nothing changes
    assert shapes(out) == shapes(source)
    convert(source, tmp_path / "raised", kv_heads=8)  # repeats, which is exact
    outputs = []
    for folder in (source, tmp_path / "raised"):
        model = load(folder)
        attention = Glm4MoeDecoderLayer(model.config, 1).self_attn.eval()
        prefix = f"{BEHIND}.self_attn."
        weights = load_file(folder / "model.safetensors")
        own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        attention.load_state_dict(own, strict=True)
        hidden = torch.randn((1, 10, 64), generator=torch.Generator().manual_seed(0))
        rotary = model.model.rotary_emb(hidden, torch.arange(10)[None])
        with torch.no_grad():
            outputs.append(attention(hidden, rotary, None)[0])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)


def test_its_own_parts_tell_it_from_a_wrong_number_of_layers(tmp_path: Path) -> None:
    known = with_predictor(tmp_path / "known", "llama", BEHIND, others=PARTS)
    convert(known, tmp_path / "out", kv_heads=2)
    assert shapes(tmp_path / "out")[f"{BEHIND}.self_attn.k_proj.weight"] == (16, 64)
    unknown = with_predictor(tmp_path / "unknown", "llama", BEHIND)
    words = "lies behind the 2 layers that config.json describes; the tensors have 3"
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(unknown, tmp_path / "other", kv_heads=2)
    assert caught.value.fix.startswith("set num_hidden_layers to 3 in config.json")
    assert "--drop-extra-attention" in caught.value.fix
