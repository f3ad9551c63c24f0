"""NVIDIA/Model-Optimizer#860, 2U1/Qwen-VL-Series-Finetune#259: `mtp.*` tensors were left behind.

Tools that look at the decoder's layers alone lose the block of multi-token prediction, or keep it
as it was under a configuration that has changed. Its attention is built from the decoder's number
of KV heads.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.predictors import rewrite, shapes, with_predictor
from tests.regress.folders import IDS, load, logits, pooled
from tests.tiny import convert
from upcycle.conversion.verify import verify

MELLUM = {
    "others": {
        "mtp.fc.weight": (64, 128),
        "mtp.norm.weight": (64,),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (64,),
    },
    "config": {"num_nextn_predict_layers": 1, "mtp_layer_types": ["full_attention"]},
}


def test_qwen3_next_s_block_is_pooled_like_the_layers(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source", "qwen3_next")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for role in ("k_proj", "v_proj"):
        name = f"mtp.layers.0.self_attn.{role}.weight"
        heads = before[name].unflatten(0, (4, 16))
        assert torch.equal(after[name], pooled(heads, 2)[::2].flatten(0, 1))
    same = {name for name in before if torch.equal(before[name], after[name][: len(before[name])])
            and before[name].shape == after[name].shape}  # fmt: skip
    merged = {name for name in before if name.endswith(("k_proj.weight", "v_proj.weight"))}
    assert before.keys() - same == merged
    assert verify(source, out).passed


def test_a_block_that_kept_the_old_heads_does_not_verify(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source", "qwen3_next")
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    name = "mtp.layers.0.self_attn.k_proj.weight"
    old = load_file(source / "model.safetensors")[name]
    rewrite(out, lambda weights: weights.update({name: old}))
    failed = {check.name: check.detail for check in verify(source, out).checks if not check.passed}
    assert failed["no attention keeps the old KV heads"] == f"first: {name}"
    assert failed["merged tensors are what the method makes"] == f"first: {name}"


@pytest.mark.parametrize("drop", [False, True])
def test_plain_transformers_ignores_it_as_before(tmp_path: Path, drop: bool) -> None:
    source = with_predictor(tmp_path / "source", "qwen3_next")
    convert(source, tmp_path / "out", kv_heads=2, drop_extra_attention=drop)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert any(name.startswith("mtp") for name in shapes(tmp_path / "out")) is not drop


def test_transformers_own_class_loads_the_merged_block(tmp_path: Path) -> None:
    """With heads of a group alike, every output of the block is the source's."""
    source, out = with_predictor(tmp_path / "source", "mellum", **MELLUM), tmp_path / "out"

    def tie(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = pooled(weights[name].unflatten(0, (4, 16)), 2).flatten(0, 1)

    rewrite(source, tie)
    convert(source, out, kv_heads=2)
    assert shapes(out)["mtp.layers.0.self_attn.k_proj.weight"] == (32, 64)
    found = []
    for folder in (source, out):
        model = load(folder)
        block = MtpModel.from_pretrained(model)
        hidden = torch.randn((1, IDS.shape[1], 64), generator=torch.Generator().manual_seed(0))
        places = torch.arange(IDS.shape[1])[None]
        with torch.no_grad():
            embedded = block.embed_tokens(IDS)
            rotary = block.rotary_emb(embedded, places, block.config.layer_types[0])
            layer = block.layers[0]
            output = layer(embedded, hidden, rotary, None, places, None)
        found.append((layer.mtp_block.self_attn.k_proj.out_features, output, logits(model)))
    assert [heads for heads, *_ in found] == [64, 32]
    for expected, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)
