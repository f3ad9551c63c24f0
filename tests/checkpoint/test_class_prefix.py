"""Classes whose head gives the decoder another first name: transformer. in place of model."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.predictors import rewrite
from tests.tiny import byte_tokenizer, convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.planning import plan


def saved_as(folder: Path, kind: str, model_type: str, head: str) -> Path:
    """A tiny model with another head, as transformers stores it."""
    plain = tiny_checkpoint(folder.parent / f"{folder.name}-causal", model_type)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(plain)
    getattr(transformers, f"{kind}For{head}")(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "model_type", "head", "prefix"),
    [
        ("Llama", "llama", "QuestionAnswering", "transformer."),
        ("Qwen2", "qwen2", "QuestionAnswering", "transformer."),
        ("Qwen3", "qwen3", "QuestionAnswering", "transformer."),
        ("Mistral", "mistral", "QuestionAnswering", "model."),
        ("Llama", "llama", "SequenceClassification", "model."),
    ],
)
def test_another_head_converts_and_verifies(
    tmp_path: Path, kind: str, model_type: str, head: str, prefix: str
) -> None:
    source, out = saved_as(tmp_path / "source", kind, model_type, head), tmp_path / "out"
    assert any(n.startswith(prefix) for n in load_file(source / "model.safetensors"))
    heads = inspect_checkpoint(Checkpoint.describe(source)).shape.num_key_value_heads
    convert(source, out, kv_heads=heads // 2)
    assert verify(source, out).passed
    getattr(transformers, f"{kind}For{head}").from_pretrained(out)
    before, after = (load_file(f / "model.safetensors") for f in (source, out))
    key = f"{prefix}layers.0.self_attn.k_proj.weight"
    pairs = before[key].unflatten(0, (heads // 2, 2, -1)).double().mean(1).flatten(0, 1)
    assert torch.equal(after[key], pairs.to(after[key].dtype))


def test_it_is_calibrated_like_any_other(tmp_path: Path) -> None:
    source = saved_as(tmp_path / "source", "Llama", "llama", "QuestionAnswering")
    out, plain = tmp_path / "out", tmp_path / "plain"
    text = tmp_path / "text.txt"
    text.write_text("A line of text, and another one.\n" * 400)
    heads = inspect_checkpoint(Checkpoint.describe(source)).shape.num_key_value_heads
    asked = {"kv_heads": heads // 2, "calibration": [text], "calibration_tokens": 512}
    convert(source, out, **asked)
    # The same decoder under the usual name.
    shutil.copytree(source, plain)
    rewrite(
        plain,
        lambda w: [w.update({f"model.{n[12:]}": w.pop(n)}) for n in list(w) if n[:4] == "tran"],
    )
    config = (plain / "config.json").read_text()
    (plain / "config.json").write_text(config.replace("QuestionAnswering", "CausalLM"))
    rewrite(plain, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    convert(plain, tmp_path / "plain-out", **asked)
    ours, theirs = (load_file(f / "model.safetensors") for f in (out, tmp_path / "plain-out"))
    for name in [name for name in ours if name.startswith("transformer.")]:
        assert torch.equal(ours[name], theirs[f"model.{name[12:]}"])


def test_the_command_renames_to_what_the_class_has(tmp_path: Path) -> None:
    source = saved_as(tmp_path / "source", "Llama", "llama", "QuestionAnswering")
    rewrite(source, lambda w: [w.update({f"inner.{n}": w.pop(n)}) for n in list(w)])
    with pytest.raises(CheckpointError) as caught:
        plan(source, kv_heads=1)
    assert "has no tensor transformer.layers.0" in caught.value.what
    assert "begins with 'inner.'" in caught.value.what
    assert '"^inner' in caught.value.fix
