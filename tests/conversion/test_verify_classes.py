"""Models are verified as the class they were saved from, and refused where they lack a head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.cli.test_command_contract import upcycle
from tests.families.retarget_sources import source_model
from tests.tiny import BASE, FAMILIES, byte_tokenizer, convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checks import Check
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError
from upcycle.models.loading import check_causal_lm, load_model

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaModel": ("llama", {}),
    "MistralModel": ("mistral", {}),
    "Qwen3Model": ("qwen3", {}),
    "FalconModel": ("falcon", {}),
    "Gemma2Model": ("gemma2", {"tie_word_embeddings": True}),
    "LlamaForSequenceClassification": ("llama", {"num_labels": 3}),
    "LlamaForTokenClassification": ("llama", {"num_labels": 3}),
    "Qwen2ForSequenceClassification": ("qwen2", {"num_labels": 1, "tie_word_embeddings": True}),
    "MixtralForSequenceClassification": ("mixtral", {"num_labels": 2}),
    "FalconForTokenClassification": ("falcon", {"num_labels": 2}),
}
HEADLESS = ["LlamaModel", "LlamaForSequenceClassification", "Qwen2ForSequenceClassification"]


def saved(folder: Path, name: str) -> Path:
    """A tiny random model of a class of transformers, and a tokenizer."""
    model_type, settings = CLASSES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **FAMILIES[model_type], **settings})
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def checks_of(source: Path, output: Path) -> dict[str, Check]:
    return {check.name: check for check in verify(source, output).checks}


@pytest.mark.parametrize("name", CLASSES)
def test_every_check_passes_on_the_class_that_was_saved(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    convert(source, tmp_path / "out", kv_heads=1)
    found = checks_of(source, tmp_path / "out")
    assert all(check.passed for check in found.values()), found
    what = "hidden states" if name.endswith("Model") else "logits"
    assert found[f"permuted heads give the same {what}"].measured < 1e-6  # type: ignore[operator]
    cached = found[f"plain {name} gives the same hidden states with and without cache"]
    assert 0 < cached.measured < 1e-5  # type: ignore[operator]


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_damaged_head_or_attention_fails_by_name(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    convert(source, tmp_path / "out", kv_heads=2)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    victim = next(key for key in weights if key.endswith("1.self_attn.v_proj.weight"))
    weights[victim].mul_(1.01)
    if "score.weight" in weights:
        weights["score.weight"].zero_()
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    failed = {n: c.detail for n, c in checks_of(source, tmp_path / "out").items() if c.failed}
    assert failed["merged tensors are what the method makes"] == f"first: {victim}"
    copied = failed.get("tensors outside the merged attention are identical")
    assert copied == ("first: score.weight" if "score.weight" in weights else None)


@pytest.mark.parametrize("architectures", [None, [], ["NoSuchModel"], ["LlamaForCausalLM"]])
def test_a_bare_model_is_found_without_its_name(
    tmp_path: Path, architectures: list[str] | None
) -> None:
    source = saved(tmp_path / "source", "LlamaModel")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    convert(source, tmp_path / "out", kv_heads=2)
    found = checks_of(source, tmp_path / "out")
    assert all(check.passed for check in found.values()), found
    assert "permuted heads give the same hidden states" in found


@pytest.mark.parametrize("name", ["gpt2", "opt", "pythia, tied"])
def test_bare_models_of_retargeted_classes_are_proven_too(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source_model(name).base_model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    convert(source, tmp_path / "out", kv_heads=1)
    found = checks_of(source, tmp_path / "out")
    assert all(check.passed for check in found.values()), found
    assert any("computes the same as" in check for check in found)


def test_a_source_that_does_not_load_is_no_failure_of_the_proof(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", kv_heads=2)
    found = checks_of(source, tmp_path / "out")
    proof = found["permuted heads give the same logits"]
    assert proof.passed is None
    assert "cannot load the source" in proof.detail
    assert "model.layers.1.mlp.up_proj.weight" in proof.detail
    assert [name for name, check in found.items() if check.failed] == [
        "plain AutoModelForCausalLM loads it"  # the output is no better than its source
    ]


@pytest.mark.parametrize("name", HEADLESS)
def test_what_needs_a_causal_language_model_refuses_others(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    checkpoint = Checkpoint.open(source)
    for look in (
        lambda: load_model(source, dtype=torch.float32),
        lambda: check_causal_lm(checkpoint.config, checkpoint.tensors, source),
    ):
        with pytest.raises(CheckpointError) as caught:
            look()
        assert caught.value.what == f"the checkpoint is of {name}, which predicts no tokens"
        assert "config.json" in caught.value.where


def test_a_bare_model_whose_head_is_its_embedding_predicts_tokens(tmp_path: Path) -> None:
    source = saved(tmp_path, "Gemma2Model")
    checkpoint = Checkpoint.open(source)
    named = check_causal_lm(checkpoint.config, checkpoint.tensors, source)
    assert type(load_model(source, dtype=torch.float32)).__name__ == named == "Gemma2ForCausalLM"


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "{out}", "--text", "{text}", "--out", "{report}"),
        ("sweep", "--text", "{text}"),
        ("export", "{package}", "--context", "64"),
        ("run",),
        ("train",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_predict_tokens_refuse_a_classifier(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    source = saved(tmp_path / "source", "LlamaForSequenceClassification")
    (tmp_path / "text.txt").write_text("some text to read " * 400)
    convert(source, tmp_path / "run" / "converted", kv_heads=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output="run" if arguments[0] == "train" else "other"))
    places = {
        "out": tmp_path / "run" / "converted",
        "text": tmp_path / "text.txt",
        "report": tmp_path / "report",
        "package": tmp_path / "model.mlpackage",
    }
    first = recipe if arguments[0] in ("run", "train") else source
    rest = [argument.format(**places) for argument in arguments[1:]]
    done = upcycle(arguments[0], first, *rest)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()[-3:]
    assert lines[0] == (
        "error: the checkpoint is of LlamaForSequenceClassification, which predicts no tokens"
    )
    assert "architectures in config.json" in lines[1]
    assert not (tmp_path / "other").exists()


RECIPE = """
source: source
output: {output}
convert: {{kv_heads: 2}}
train:
  data: {{sources: [{{path: text.txt}}]}}
  steps: 2
  sequence_length: 32
  batch_size: 2
  micro_batch_size: 2
  learning_rate: 1.0e-3
evaluate: {{sequence_length: 64}}
"""


def test_checks_that_do_not_apply_are_neither_ok_nor_failed(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "falcon", alibi=True)
    convert(source, tmp_path / "out", kv_heads=1)
    done = upcycle("verify", source, tmp_path / "out")
    assert done.returncode == 0
    rows = [line for line in done.stdout.splitlines() if line.startswith("permuted heads")]
    assert [row.split()[-2:] for row in rows] == [["not", "applicable"]] * 2
    reason = "ALiBi's slope of a query head goes by its place, and stays there"
    for what in ("attention output", "logits"):
        said = f"not applicable: permuted heads give the same {what}: {reason}"
        assert said in " ".join(done.stdout.split())
    assert "inf" not in done.stdout.split()
    assert "FAILED" not in done.stdout
    document = json.loads(upcycle("verify", source, tmp_path / "out", "--json").stdout)
    assert document["passed"] is True
    found = {row["name"]: row for row in document["checks"]}
    permuted = found["permuted heads give the same logits"]
    assert (permuted["passed"], permuted["measured"]) == (None, None)
