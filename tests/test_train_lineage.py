"""What `train` goes on from: the recipe's own conversion of its own source, or a refusal."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.pipeline_runs import TinyPipeline, call, tiny_pipeline
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_file, read_manifest
from upcycle.pipeline.training import advised_convert
from upcycle.recipe.loading import load_recipe
from upcycle.training.log import read_log


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPipeline:
    return tiny_pipeline(tmp_path, steps=2)


def refusal(tiny: TinyPipeline, *overrides: str) -> str:
    """The three lines of a `train` that is refused and leaves nothing."""
    done = call("train", tiny.recipe, *overrides)
    assert done.exit_code == 2, done.output
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "  where", "  fix"]
    assert not (tiny.out / "training").exists()
    assert not (tiny.out / "uptrained").exists()
    return str(done.stderr)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_another_source_is_refused(tiny: TinyPipeline, name: str) -> None:
    assert tiny.convert().exit_code == 0
    other = tiny.folder / "other"
    shutil.copytree(tiny.folder / "source", other)
    if name == "model.safetensors":
        weights = load_file(other / name)
        weights["model.norm.weight"] += 1
        save_file(weights, other / name, {"format": "pt"})
    else:
        (other / name).write_text((other / name).read_text() + "\n")
    message = refusal(tiny, f"source={other}")
    assert f"was not made from {other}: {name} there is another" in message
    assert "train.teacher" in message


def test_cards_and_settings_are_not_the_model(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    source = tiny.folder / "source"
    (source / "README.md").write_text("a card")
    (source / "generation_config.json").write_text("{}")
    assert call("train", tiny.recipe).exit_code == 0


def test_another_teacher_is_taken_by_name(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    teacher = tiny_checkpoint(tiny.folder / "large", seed=7, hidden_size=128)
    named = f"train.teacher={teacher}"
    done = call("train", tiny.recipe, named)
    assert done.exit_code == 0, done.stderr
    assert "the teacher is large, as the recipe names it, not the source" in done.stdout
    manifest = read_manifest(tiny.out / "uptrained")
    assert manifest is not None
    weights = "model.safetensors"
    assert manifest.source.document["teacher"][weights] == hash_file(teacher / weights)
    source = hash_file(tiny.folder / "source" / weights)
    assert manifest.source.origin[weights] == source
    log = [row for row in read_log(tiny.out / "training" / "log.jsonl") if row.teacher is not None]
    assert log[0].teacher == "large"
    assert log[0].files[weights] == hash_file(teacher / weights)
    done = call("run", tiny.recipe, named, "--json")
    assert json.loads(done.stdout)["skipped"] == ["convert", "train"], done.stderr
    refused = call("run", tiny.recipe)
    assert refused.exit_code == 2
    assert "teacher: config.json, model.safetensors changed" in refused.stderr


def test_a_teacher_of_other_tokens_is_refused(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    teacher = tiny_checkpoint(tiny.folder / "other", seed=7)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer is not the source's" in refusal(tiny, f"train.teacher={teacher}")
    refused = call("run", tiny.recipe, f"train.teacher={teacher}")
    assert "its tokenizer is not the source's" in refused.stderr
    missing = refusal(tiny, f"train.teacher={tiny.folder / 'none'}")
    assert "none is not a folder" in missing


@pytest.mark.parametrize(
    ("option", "override", "what"),
    [
        (("--method", "first"), "convert.method=null", "method was 'first' and is 'mean'"),
        (("--method", "random", "--seed", "1"), "convert.method=random", "seed was 1 and is 0"),
        ((), "convert.kv_heads=4", "has 2 KV heads, and the recipe asks for 4"),
        ((), "convert.calibration=[builtin]", "calibration was [] and is ['builtin']"),
    ],
)
def test_another_conversion_is_refused(
    tiny: TinyPipeline, option: tuple[str, ...], override: str, what: str
) -> None:
    assert tiny.convert(*option).exit_code == 0
    message = refusal(tiny, override)
    assert what in message
    assert "--overwrite" in message


def test_the_advised_command_makes_what_the_recipe_asks_for(tiny: TinyPipeline) -> None:
    document = yaml.safe_load(tiny.recipe.read_text())
    text = tiny.folder / "my text.jsonl"
    shutil.copy(tiny.folder / "text.jsonl", text)
    document["convert"] = {
        "kv_heads": 2,
        "calibration": ["my text.jsonl", "builtin"],
        "calibration_tokens": 1024,
        "refine": 2,
        "grouping": "search",
        "seed": 5,
    }
    tiny.recipe.write_text(yaml.safe_dump(document))
    recipe = load_recipe(tiny.recipe)
    command = advised_convert(recipe)
    assert f"run `{command}`" in refusal(tiny)
    assert shlex.split(command)[4:] == [
        *("--kv-heads", "2", "--calibration", str(text), "--calibration", "builtin"),
        *("--calibration-tokens", "1024", "--refine", "2", "--grouping", "search", "--seed", "5"),
    ]
    words = shlex.split(command)
    made = call(words[1], *words[2:])
    assert made.exit_code == 0, made.stderr
    text.write_text(text.read_text() + '\n{"text": "more"}')
    assert "calibration changed" in refusal(tiny)
    shutil.copy(tiny.folder / "text.jsonl", text)
    assert call("train", tiny.recipe).exit_code == 0
    done = call("run", tiny.recipe, "--json")
    assert json.loads(done.stdout)["skipped"] == ["convert", "train"], done.stderr


def test_a_conversion_that_was_edited_is_refused(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    config = tiny.out / "converted" / "config.json"
    config.write_text(config.read_text() + "\n")
    message = refusal(tiny)
    assert "config.json was changed after" in message
    (tiny.out / "converted" / "upcycle.json").unlink()
    done = call("train", tiny.recipe)
    assert done.exit_code == 0
    assert "converted does not say what it was made from" in done.stdout


def test_uptraining_goes_on_from_an_uptrained_folder(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    assert call("train", tiny.recipe).exit_code == 0
    second = tiny.folder / "second"
    shutil.copytree(tiny.out / "uptrained", second / "converted")
    done = call("train", tiny.recipe, f"output={second}")
    assert done.exit_code == 0, done.stderr
    assert "converted was uptrained before" in done.stdout
    manifest = read_manifest(second / "uptrained")
    assert manifest is not None
    assert manifest.source.origin["tokenizer.json"].startswith("xxh3-128:")
    other = tiny_checkpoint(tiny.folder / "other", seed=3)
    refused = call("train", tiny.recipe, f"output={second}", f"source={other}", "--overwrite")
    assert refused.exit_code == 2
    assert f"was not made from {other}: model.safetensors there is another" in refused.stderr


def test_eval_against_another_source_is_told(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    other = tiny_checkpoint(tiny.folder / "other", seed=3)
    options = ("--max-tokens", 50, "--sequence-length", 32)
    report = tiny.folder / "report"
    done = call("eval", other, tiny.out / "converted", "--out", report, *options)
    assert done.exit_code == 0, done.stderr
    warning = "converted (converted) was not made from other: model.safetensors there is another"
    assert f"warning: {warning}" in done.stdout
    for name in ("report.md", "report.html"):
        assert f"Warning: {warning}" in (report / name).read_text()
    right = call(
        "eval", tiny.folder / "source", tiny.out / "converted", "--out", tiny.folder / "r", *options
    )
    assert "warning" not in right.stdout
