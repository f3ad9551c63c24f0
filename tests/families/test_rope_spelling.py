"""The older keys of the rotation say what `rope_parameters` says, and transformers agrees."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.families.retarget_sources import SOURCES, source_checkpoint, view_of
from upcycle.families import convertible
from upcycle.families.rope_spelling import missing_rope_keys, older_rope_keys
from upcycle.models.loading import model_of

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 77.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 77.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 33.0}
RETARGETED = [name for name, (_, _, target) in SOURCES.items() if target != "gpt_bigcode"]


def read(folder: Path, config: dict[str, Any]) -> Any:
    """The configuration as transformers reads it from a file."""
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("model_type", convertible())
def test_transformers_reads_the_same_with_both(tmp_path: Path, model_type: str) -> None:
    saved = AutoConfig.for_model(model_type).to_dict()
    cases = [saved]
    stated = saved.get("rope_parameters") or {}
    if "full_attention" in stated:
        cases.append(
            {**saved, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}}
        )
    elif stated and model_type not in ("phi3", "phimoe"):  # which know one kind of scaling
        partial = {k: v for k, v in stated.items() if k == "partial_rotary_factor"}
        cases += [{**saved, "rope_parameters": {**one, **partial}} for one in (LINEAR, YARN, PLAIN)]
    for config in cases:
        before = read(tmp_path, config)
        both = {**config, **older_rope_keys(config)}
        after = read(tmp_path, both)
        for key in ("rope_parameters", "partial_rotary_factor", "max_position_embeddings"):
            expected = getattr(before, key, None)
            if key != "partial_rotary_factor" or expected is not None:
                assert getattr(after, key, None) == expected
        assert missing_rope_keys(both) == {}


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (PLAIN, {"rope_theta": 33.0}),
        (
            {**LINEAR, "partial_rotary_factor": 0.4},
            {
                "rope_theta": 77.0,
                "partial_rotary_factor": 0.4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ({"full_attention": PLAIN, "sliding_attention": PLAIN}, {"rope_theta": 33.0}),
        (
            {"full_attention": LINEAR, "sliding_attention": PLAIN},
            {
                "rope_theta": 77.0,
                "rope_local_base_freq": 33.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ({"full_attention": PLAIN, "sliding_attention": None}, {"rope_theta": 33.0}),
        (None, {}),
        ([1], {}),
    ],
)
def test_the_keys(rope: Any, keys: dict[str, Any]) -> None:
    assert older_rope_keys({"rope_parameters": rope}) == keys


def test_what_is_missing() -> None:
    config = {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}, "rope_theta": 1.0}
    expected = older_rope_keys(config)
    assert missing_rope_keys(config) == expected, "the other base is contradicted"
    assert missing_rope_keys({**config, **expected}) == {}
    older = {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert missing_rope_keys(older) == {}, "a configuration from before transformers 5"
    assert missing_rope_keys({"model_type": "llama"}) == {}, "the class default, for everyone"


@pytest.mark.parametrize("name", RETARGETED)
def test_retargets_write_both(tmp_path: Path, name: str) -> None:
    """With and without the older keys: the same configuration, and logits to the last bit."""
    view = view_of(source_checkpoint(tmp_path, name))
    new = {key: value for key, value in view.config.items() if key != "rope_scaling"}
    keys = older_rope_keys(new)
    assert {"rope_theta", "partial_rotary_factor"} <= keys.keys()
    assert missing_rope_keys(view.config) == {}
    alone = {key: value for key, value in view.config.items() if key not in keys}
    both = read(tmp_path, dict(view.config))
    assert both.rope_parameters == read(tmp_path, alone).rope_parameters
    weights = {tensor: view.read(tensor) for tensor in view.tensors}
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = [model_of(config, dict(weights))(ids).logits for config in (view.config, alone)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", SOURCES)
def test_retargets_leave_nothing_to_a_default(tmp_path: Path, name: str) -> None:
    config = view_of(source_checkpoint(tmp_path, name)).config
    null = {key for key, value in config.items() if value is None}
    assert null <= {"pad_token_id", "sliding_window"}, "here null is what there is to say"
    if config["model_type"] == "gpt_bigcode":
        settings = SOURCES[name][1]
        assert config["n_inner"] == settings.get("ffn_dim", settings.get("n_inner", 4 * 48))
        assert config["scale_attn_weights"] is True
