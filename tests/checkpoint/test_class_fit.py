"""Names and shapes against transformers' class: no false alarm, and what from_pretrained finds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MistralModel

from tests.families.retarget_sources import SOURCES, source_checkpoint, view_of
from tests.regress.folders import get_config, set_config
from tests.tiny import FAMILIES, convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.models.class_fit import class_fit, class_fit_beside

WEIGHTS = "model.safetensors"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_family_gives_an_alarm(tmp_path: Path, model_type: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type)
    fit = class_fit(Checkpoint.open(source))
    assert fit.warnings == []
    assert fit.model_class == get_config(source)["architectures"][0]
    convert(source, tmp_path / "out", kv_heads=8)
    assert class_fit(Checkpoint.open(tmp_path / "out")).warnings == []


@pytest.mark.parametrize("model_type", ["llama", "gemma", "mixtral", "falcon", "phi3", "jamba"])
def test_no_converted_family_gives_an_alarm(tmp_path: Path, model_type: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type)
    convert(source, tmp_path / "out", kv_heads=1)
    assert class_fit(Checkpoint.open(tmp_path / "out")).warnings == []


@pytest.mark.parametrize("name", SOURCES)
def test_no_retarget_gives_an_alarm(tmp_path: Path, name: str) -> None:
    assert class_fit(view_of(source_checkpoint(tmp_path / "source", name))).warnings == []


def test_tied_weights_may_be_stored_or_not(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(source / WEIGHTS)
    assert class_fit(Checkpoint.open(source)).warnings == []
    change(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert class_fit(Checkpoint.open(source)).warnings == []


def test_a_bare_model_is_compared_with_its_own_class(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "mistral")
    model = MistralModel.from_pretrained(source)
    model.save_pretrained(tmp_path / "bare")
    fit = class_fit(Checkpoint.open(tmp_path / "bare"))
    assert (fit.model_class, fit.warnings) == ("MistralModel", [])
    set_config(tmp_path / "bare", architectures=None)
    fit = class_fit(Checkpoint.open(tmp_path / "bare"))
    assert fit.model_class == "MistralForCausalLM"
    assert list(fit.missing.items()) == [("lm_head.weight", [260, 64])]


def test_another_head_is_compared_with_its_own_class(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=3)
    model.save_pretrained(tmp_path / "classifier")
    assert class_fit(Checkpoint.open(tmp_path / "classifier")).warnings == []


def test_old_buffers_are_no_alarm(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    cached = {"model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 8)}
    change(source, lambda t: t.update(cached))
    assert class_fit(Checkpoint.open(source)).warnings == []


MLP = "model.layers.0.mlp"
CASES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], dict[str, Any], dict[str, Any]]]
CASES = {
    "few embedding rows": (
        lambda t: None,
        {"vocab_size": 300},
        {
            "mismatched": {
                "lm_head.weight": [[260, 64], [300, 64]],
                "model.embed_tokens.weight": [[260, 64], [300, 64]],
            }
        },
    ),
    "padded vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.zeros(320, 64)}),
        {},
        {"mismatched": {"lm_head.weight": [[320, 64], [260, 64]]}},
    ),
    "missing MLP": (
        lambda t: t.pop(f"{MLP}.up_proj.weight"),
        {},
        {"missing": {f"{MLP}.up_proj.weight": [96, 64]}},
    ),
    "missing norm": (
        lambda t: t.pop("model.norm.weight"),
        {},
        {"missing": {"model.norm.weight": [64]}},
    ),
    "missing embedding": (
        lambda t: t.pop("model.embed_tokens.weight"),
        {},
        {"missing": {"model.embed_tokens.weight": [260, 64]}},
    ),
    "misshapen norm": (
        lambda t: t.update({"model.layers.1.input_layernorm.weight": torch.ones(32)}),
        {},
        {"mismatched": {"model.layers.1.input_layernorm.weight": [[32], [64]]}},
    ),
    "misshapen MLP": (
        lambda t: t.update({f"{MLP}.down_proj.weight": torch.ones(64, 48)}),
        {},
        {"mismatched": {f"{MLP}.down_proj.weight": [[64, 48], [64, 96]]}},
    ),
    "extra layer without attention": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
        {},
        {"unexpected": {"model.layers.2.mlp.up_proj.weight": [96, 64]}},
    ),
    "LoRA": (
        lambda t: t.update(
            {
                f"{MLP}.up_proj.base_layer.weight": t.pop(f"{MLP}.up_proj.weight"),
                f"{MLP}.up_proj.lora_A.default.weight": torch.ones(4, 64),
                f"{MLP}.up_proj.lora_B.default.weight": torch.ones(96, 4),
            }
        ),
        {},
        {
            "missing": {f"{MLP}.up_proj.weight": [96, 64]},
            "unexpected": {
                f"{MLP}.up_proj.base_layer.weight": [96, 64],
                f"{MLP}.up_proj.lora_A.default.weight": [4, 64],
                f"{MLP}.up_proj.lora_B.default.weight": [96, 4],
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_what_from_pretrained_reports(tmp_path: Path, case: str) -> None:
    edit, config, expected = CASES[case]
    source = change(tiny_checkpoint(tmp_path / "source"), edit)
    if config:
        set_config(source, **config)
    fit = class_fit(Checkpoint.open(source))
    found = {"missing": fit.missing, "unexpected": fit.unexpected, "mismatched": fit.mismatched}
    assert {kind: names for kind, names in found.items() if names} == expected
    _, report = AutoModelForCausalLM.from_pretrained(
        source, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert set(fit.missing) == set(report["missing_keys"])
    assert set(fit.unexpected) == set(report["unexpected_keys"])
    assert set(fit.mismatched) == {name for name, *_ in report["mismatched_keys"]}
    assert fit.loads == (not fit.missing and not fit.mismatched)


@pytest.mark.parametrize("lost", [1, 4])
def test_experts_that_are_missing_are_told(tmp_path: Path, lost: int) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if any(f"layers.0.mlp.experts.{i}.down_proj" in name for i in range(lost)):
                del tensors[name]

    fit = class_fit(Checkpoint.open(change(source, drop)))
    assert not fit.loads
    assert [*fit.missing, *fit.mismatched] == ["model.layers.0.mlp.experts.down_proj"]


def test_a_refused_configuration_is_told_with_the_version(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, num_attention_heads=6)
    fit = class_fit(Checkpoint.open(source))
    assert fit.model_class is None
    assert not fit.loads
    (words,) = fit.warnings
    assert words.startswith(f"transformers {fit.transformers} refuses the configuration: ")
    assert "The hidden size (64) is not a multiple of the number of attention heads (6)" in words


def test_the_words_show_a_few_of_many(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, intermediate_size=80)
    (words,) = class_fit(Checkpoint.open(source)).warnings
    assert words.startswith("LlamaForCausalLM of transformers ")
    assert "6 mismatched: model.layers.0.mlp.down_proj.weight is [64, 96], the class has " in words
    assert words.endswith(" and 3 more")


def test_a_process_without_transformers_asks_a_child(tmp_path: Path) -> None:
    """With the same answer; and `plan` and `inspect` ask nobody."""
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, vocab_size=300)
    script = """
import dataclasses, json, sys
from upcycle.models.class_fit import class_fit_beside
from upcycle.checkpoint.reader import Checkpoint
with class_fit_beside(Checkpoint.open(sys.argv[1])) as pending:
    found = pending.result()
assert "transformers" not in sys.modules and "torch" not in sys.modules
print(json.dumps(dataclasses.asdict(found)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, source], capture_output=True, text=True, check=True
    )
    with class_fit_beside(Checkpoint.open(source)) as here:
        assert json.loads(done.stdout) == json.loads(json.dumps(vars(here.result())))


def test_a_child_that_cannot_start_leaves_it_to_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with class_fit_beside(Checkpoint.open(source)) as pending:
        monkeypatch.undo()
        assert pending.result().warnings == []


def test_inspect_needs_no_class(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    set_config(source, vocab_size=300)
    assert inspect_checkpoint(Checkpoint.open(source)).model_type == "llama"


def test_experts_of_unequal_sizes_are_not_called_missing(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, "mixtral")

    def cut(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "layers.0" in name and "experts.1." in name]:
            half = weights[name].chunk(2, dim=1 if ".w2." in name else 0)[0]
            weights[name] = half.contiguous()

    change(source, cut)
    fit = class_fit(Checkpoint.open(source))
    assert not fit.loads
    assert not fit.missing
    experts = "model.layers.0.mlp.experts."
    assert list(fit.unjoined) == [f"{experts}down_proj", f"{experts}gate_up_proj"]
    (line,) = fit.warnings
    assert "2 that loading cannot join from the tensors that are there, such as experts of" in line
    assert "missing" not in line
