"""What no class can express, and what contradicts itself, is refused before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.retarget_sources import rewrite, source_checkpoint, view_of
from upcycle.errors import CheckpointError, FamilyError


def set_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gptj", {"rotary_dim": None}, "rotary_dim"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim"),
        ("gptj", {"rotary_dim": 14}, "rotary_dim"),
        ("pythia", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary part of 0.25"),
        ("pythia", {"rope_parameters": {"partial_rotary_factor": "1"}}, "rotary part of '1'"),
        ("pythia", {"rope_parameters": [1]}, "rotary parameters"),
        ("pythia", {"num_attention_heads": 5}, "5 heads do not divide"),
        ("pythia", {"num_attention_heads": True}, "num_attention_heads is True"),
        ("gpt2", {"n_layer": 0}, "n_layer is 0"),
        ("gpt2", {"n_inner": "no"}, "n_inner is 'no'"),
        ("opt", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_settings_that_no_class_expresses_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], reason: str
) -> None:
    folder = source_checkpoint(tmp_path, name)
    set_config(folder, **settings)
    with pytest.raises(FamilyError, match=reason):
        view_of(folder)


@pytest.mark.parametrize("named", ["GPTNeoXModel", "GPTNeoXForSequenceClassification"])
def test_another_head_is_named(tmp_path: Path, named: str) -> None:
    folder = source_checkpoint(tmp_path, "pythia")
    rewrite(folder, lambda tensors: tensors.pop("embed_out.weight"))
    set_config(folder, architectures=[named])
    with pytest.raises(CheckpointError, match=r"no tensor embed_out\.weight") as caught:
        view_of(folder)
    assert f"{named}; only causal language models can change their class" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("gpt_neox.layers.2.mlp.dense_4h_to_h.bias"), "no tensor gpt_neox.lay"),
        (lambda t: t.pop("embed_out.weight"), "no tensor embed_out.weight"),
        (lambda t: t.update({"score.weight": torch.ones(2, 48)}), "score.weight is not part"),
        (lambda t: t.update({"gpt_neox.layers.3.mlp.x": torch.ones(2)}), "layers.3.mlp.x"),
        (
            lambda t: t.update({"gpt_neox.embed_in.weight": torch.ones(261, 48)}),
            r"shape \[260, 48\] but gpt_neox.embed_in.weight is F32 \[261, 48\]",
        ),
        (
            lambda t: t.update({"gpt_neox.embed_in.weight": torch.ones(260, 48).to(torch.int8)}),
            "embed_in.weight is I8",
        ),
    ],
)
def test_tensors_that_contradict_the_configuration_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    folder = source_checkpoint(tmp_path, "pythia")
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=reason):
        view_of(folder)
