"""`upcycle run`: every stage once, again only where something that it reads changed."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.cli.console import Console
from upcycle.cli.run import run_command
from upcycle.pipeline import RunResult, run
from upcycle.progress import Progress
from upcycle.recipe.loading import load_recipe

RECIPE = """
source: source
output: out
convert: {kv_heads: 2}
train:
  data: {sources: [{path: text.jsonl}]}
  sequence_length: 32
  batch_size: 2
  micro_batch_size: 2
  steps: 4
  learning_rate: 1.0e-3
  precision: fp32
  checkpoint_every: 1
evaluate:
  text: [text.jsonl]
  max_tokens: 200
  sequence_length: 32
  prompts: ["ab"]
  new_tokens: 4
export: {context: 32}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "source")
    lines = [json.dumps({"text": f"row {i} of a small text, {i * i}"}) for i in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def run_it(path: Path, *overrides: str) -> tuple[RunResult, list[str]]:
    """The result, and the stages that ran."""
    ran: list[str] = []

    def announce(stage: str, skipped: bool) -> None:
        if not skipped:
            ran.append(stage)

    return run(load_recipe(path, overrides), command="upcycle run", announce=announce), ran


def test_a_run_makes_everything_and_a_second_one_nothing(recipe: Path) -> None:
    result, ran = run_it(recipe)
    assert ran == ["convert", "train", "evaluate", "export"]
    labels = [model["label"] for model in result.report["comparison"]["models"]]
    assert labels == ["source", "converted", "uptrained"]
    assert result.report["export"]["kv_tiles"] == 0
    assert result.report["training"]["steps"] == 4
    assert result.package is not None
    assert result.package.is_dir()
    before = hash_folder(result.layout.output)

    again, ran = run_it(recipe)
    assert ran == []
    assert again.report == result.report
    assert hash_folder(result.layout.output) == before


def test_a_changed_option_runs_what_depends_on_it(recipe: Path) -> None:
    run_it(recipe)
    assert run_it(recipe, "export.context=64")[1] == ["export"]
    result, ran = run_it(recipe, "export.context=64", "evaluate.max_tokens=100")
    assert ran == ["evaluate"]
    assert result.report["export"]["context"] == 64, "the new report has the export's section too"
    assert run_it(recipe, "export.context=64", "convert.kv_heads=4")[1] == [
        "convert",
        "train",
        "evaluate",
        "export",
    ]


def test_changed_text_and_changed_weights_are_seen(recipe: Path) -> None:
    run_it(recipe)
    text = recipe.with_name("text.jsonl")
    text.write_text(text.read_text() + '\n{"text": "one row more"}')
    assert run_it(recipe)[1][:2] == ["train", "evaluate"]
    weights = recipe.parent / "source" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert run_it(recipe)[1] == ["convert", "train", "evaluate", "export"]


def test_an_interrupted_training_goes_on_to_the_same_bytes(recipe: Path, tmp_path: Path) -> None:
    class StopNowError(Exception):
        pass

    def stop_in_training(progress: Progress) -> None:
        if progress.task == "train" and progress.done == 2:
            raise StopNowError

    with pytest.raises(StopNowError):
        run(load_recipe(recipe), command="upcycle run", watch=stop_in_training)
    assert (tmp_path / "out" / "converted").is_dir()
    assert not (tmp_path / "out" / "uptrained").exists()

    result, ran = run_it(recipe)
    assert ran == ["train", "evaluate", "export"]
    log = (result.layout.training / "log.jsonl").read_text()
    assert '"resumed": true' in log
    whole, _ = run_it(recipe, f"output={tmp_path / 'whole'}")
    assert hash_folder(result.layout.uptrained) == hash_folder(whole.layout.uptrained)


def test_training_and_export_may_be_left_out(recipe: Path) -> None:
    text = RECIPE.split("train:")[0] + "evaluate: {text: [text.jsonl], max_tokens: 100, "
    recipe.write_text(text + "sequence_length: 32}\n")
    result, ran = run_it(recipe)
    assert ran == ["convert", "evaluate"]
    assert result.package is None
    assert result.report["export"] is None


def test_a_failed_margin_is_no_success(recipe: Path) -> None:
    console = Console(json=True, quiet=True)
    assert run_command(console, recipe, ["evaluate.margins.kl_mean=100"]).passed
    assert not run_command(console, recipe, ["evaluate.margins.kl_mean=1e-9"]).passed
