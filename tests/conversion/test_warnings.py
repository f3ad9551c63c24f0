"""What is right for transformers and not for every engine is said where it is decided."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.families.retarget_sources import SOURCES, source_checkpoint
from tests.tiny import add_older_keys, convert, tiny_checkpoint
from upcycle.cli import convert as _convert  # noqa: F401 - registers the command
from upcycle.cli import plan as _plan  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.families.retargets.rules import RETARGETS
from upcycle.pipeline.preflight import preflight
from upcycle.planning import plan

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo-source"


def run(*arguments: object) -> Result:
    """A command that succeeds."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("model_type", "rope", "asked"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 500.0}, '"rope_theta": 500.0'),
        (
            "stablelm",
            {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            '"rope_theta": 500.0, "partial_rotary_factor": 0.5',
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
            (
                '"rope_theta": 900.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, '
                '"rope_local_base_freq": 70.0'
            ),
        ),
    ],
)
def test_a_copied_rotation_in_one_spelling(
    tmp_path: Path, model_type: str, rope: dict[str, Any], asked: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type, rope_parameters=rope)
    result = convert(source, tmp_path / "out", kv_heads=1)
    (warning,) = result.plan.warnings
    assert f"add {asked} to the top level" in warning
    assert convert(add_older_keys(source), tmp_path / "both", kv_heads=1).plan.warnings == ()
    assert json.loads((tmp_path / "both" / "config.json").read_text())["rope_theta"] > 100


def test_the_configuration_still_changes_in_one_key(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=1)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    assert {key for key in after if after[key] != before.get(key)} == {"num_key_value_heads"}
    assert before.keys() <= after.keys()


@pytest.mark.parametrize(
    ("name", "kv_heads", "words"),
    [
        ("pythia", 2, "gguf_set_metadata --force FILE phi2.attention.head_count_kv 2"),
        ("pythia", 4, None),
        ("pythia, scaled", 4, "mlx-lm does not read rope_scaling"),
        ("gptj", 1, "phi2.attention.head_count_kv 1"),
        ("codegen", 1, "phi2.attention.head_count_kv 1"),
        ("neox, sequential", 2, None),
        ("neox, sequential, partial rotary", 2, "hidden_act gelu_new"),
        ("gpt2", 1, None),
        ("gpt2", 4, "know the class with one KV head alone"),
        ("gpt2, untied", 1, "activation_function relu"),
        ("opt", 1, "activation_function relu"),
        ("opt, no affine", 1, None),
    ],
)
def test_a_changed_class(
    tmp_path: Path,
    name: str,
    kv_heads: int,
    words: str | None,
) -> None:
    source = source_checkpoint(tmp_path / "source", name)
    warnings = plan(source, kv_heads=kv_heads).warnings
    assert (words is None and warnings == ()) or (words in warnings[0] and len(warnings) == 1)
    for command in (["plan", source], ["convert", source, tmp_path / "out"]):
        lines = run(*command, "--kv-heads", kv_heads).stderr.splitlines()
        found = [line for line in lines if line.startswith("warning: ")]
        assert found == [f"warning: {warning}" for warning in warnings]


def test_every_rule_says_what_it_makes() -> None:
    made = {(model_type, target) for model_type, _, target in SOURCES.values()}
    declared = {
        (rule.model_type, target.model_type)
        for rule in RETARGETS.values()
        for target in rule.targets
    }
    assert declared == made


@pytest.mark.parametrize(
    ("file", "changes", "where"),
    [
        ("generation_config.json", {"use_cache": False}, "generation_config.json, use_cache"),
        ("config.json", {"use_cache": False}, "config.json, use_cache"),
        (
            "generation_config.json",
            {"text_config": {"use_cache": False}},
            "generation_config.json, text_config.use_cache",
        ),
        ("config.json", {"use_cache": True, "nested": {"use_cache": None}}, None),
    ],
)
def test_a_cache_that_is_switched_off(
    tmp_path: Path,
    file: str,
    changes: dict[str, Any],
    where: str | None,
) -> None:
    source = add_older_keys(tiny_checkpoint(tmp_path / "source"))
    edit(source / file, **changes)
    printed = run("convert", source, tmp_path / "out", "--kv-heads", 2, "--json").stdout
    warnings = json.loads(printed)["warnings"]
    assert len(warnings) == (where is not None)
    if where is not None:
        assert f"use_cache is false ({where})" in warnings[0]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"source": str(source), "output": "runs", "convert": {"kv_heads": 2}})
    )
    details = {check.name: check.detail for check in preflight(recipe)}
    said = ["8 → 2 KV heads", *(f"warning: {warning}" for warning in warnings)]
    assert details["conversion"] == "; ".join(said)


def test_a_retargeted_source_that_switches_its_cache_off(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gpt2", use_cache=False)
    (warning,) = plan(source, kv_heads=1).warnings
    assert "config.json, use_cache" in warning


def test_a_generation_config_that_is_not_readable_is_copied_all_the_same(tmp_path: Path) -> None:
    source = add_older_keys(tiny_checkpoint(tmp_path / "source"))
    (source / "generation_config.json").write_text("{")
    assert convert(source, tmp_path / "out", kv_heads=2).plan.warnings == ()
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{"


def test_the_demo_source_gives_no_warning() -> None:
    assert plan(DEMO, kv_heads=2).warnings == ()
