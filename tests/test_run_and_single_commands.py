"""What single commands made in a run's output is known to `run`, and the reverse."""

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.pipeline_runs import TinyPipeline, call, start, tiny_pipeline
from upcycle.checkpoint.manifest import Manifest, hash_folder
from upcycle.errors import TrainingError
from upcycle.options.convert import ConvertOptions
from upcycle.pipeline import run
from upcycle.pipeline.convert_stage import option_changes
from upcycle.progress import Progress
from upcycle.recipe.loading import load_recipe

if TYPE_CHECKING:
    import subprocess


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPipeline:
    return tiny_pipeline(tmp_path)


class StopNowError(Exception):
    pass


def stop_after(step: int, tiny: TinyPipeline) -> None:
    """A run that ends in the middle of its training."""

    def watch(progress: Progress) -> None:
        if progress.task == "train" and progress.done == step:
            raise StopNowError

    with pytest.raises(StopNowError):
        run(load_recipe(tiny.recipe), command="upcycle run", watch=watch)


def kill(process: "subprocess.Popen[str]", tiny: TinyPipeline, state: str) -> None:
    """End a process and its children as soon as a state is there."""
    while not (tiny.out / "training" / state).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    # torchrun's workers are in sessions of their own, and outlive it.
    launched = psutil.Process(process.pid)
    family = [launched, *launched.children(recursive=True)]
    for member in family:
        member.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=30)


def test_what_convert_and_train_made_is_finished(tiny: TinyPipeline) -> None:
    assert tiny.convert().exit_code == 0
    assert call("train", tiny.recipe).exit_code == 0
    before, states = hash_folder(tiny.out), tiny.states()
    assert sorted(states) == ["step-2", "step-4", "step-6"]
    done = call("run", tiny.recipe)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "convert: finished before",
        "train: finished before",
        "evaluate: running",
    ]
    assert tiny.states() == states
    after = hash_folder(tiny.out)
    assert {name: after[name] for name in before} == before
    assert call("run", tiny.recipe).stdout.splitlines()[:4] == [
        f"{stage}: finished before" for stage in ("convert", "train", "evaluate", "report")
    ]


def test_a_result_stays_finished_without_its_states_and_log(tiny: TinyPipeline) -> None:
    assert call("run", tiny.recipe, "--json").exit_code == 0
    shutil.rmtree(tiny.out / "training")
    done = call("run", tiny.recipe, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["skipped"] == ["convert", "train", "evaluate"]
    assert not (tiny.out / "training").exists()


def test_a_killed_train_is_gone_on_with(tmp_path: Path) -> None:
    tiny = tiny_pipeline(tmp_path, steps=40, checkpoint_every=1, keep_last=99)
    assert tiny.convert("--calibration", "builtin", "--calibration-tokens", 256).exit_code == 0
    calibrated = ["convert.calibration=[builtin]", "convert.calibration_tokens=256"]
    kill(start("train", tiny.recipe, *calibrated), tiny, "step-3")
    states, converted = tiny.states(), hash_folder(tiny.out / "converted")
    done = call("run", tiny.recipe, *calibrated)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == "convert: finished before"
    assert any(line.startswith("went on after step ") for line in done.stdout.splitlines())
    assert tiny.states().items() >= states.items(), "no state was removed or written again"
    assert tiny.steps() == list(range(1, 41)), "no step was trained twice"
    assert hash_folder(tiny.out / "converted") == converted


def test_a_killed_run_is_gone_on_with_by_train(tiny: TinyPipeline) -> None:
    stop_after(4, tiny)
    refused = call("train", tiny.recipe)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert call("train", tiny.recipe, "--resume").exit_code == 0
    states = tiny.states()
    done = call("run", tiny.recipe, "--json")
    assert json.loads(done.stdout)["skipped"] == ["convert", "train"]
    assert tiny.states() == states
    assert tiny.steps() == list(range(1, 7))


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["train.steps=8"], "steps was 6 and is 8"),
        (["train.learning_rate=2.0e-3"], "learning_rate was 0.001 and is 0.002"),
        (["train.schedule=linear"], "schedule was 'cosine' and is 'linear'"),
        (["convert.kv_heads=4"], "kv_heads was 2 and is 4"),
        (["convert.method=first"], "method was 'mean' and is 'first'"),
        (["convert.calibration=[builtin]"], "calibration was [] and is ['builtin']"),
    ],
)
@pytest.mark.parametrize("with_result", [True, False])
@pytest.mark.parametrize("records", [True, False])
def test_another_recipe_takes_nothing_away(
    tiny: TinyPipeline, overrides: list[str], what: str, with_result: bool, records: bool
) -> None:
    if with_result:
        assert call("run", tiny.recipe).exit_code == 0
    else:
        stop_after(4, tiny)
    if not records:
        (tiny.out / "stages.json").unlink()
    before, states = hash_folder(tiny.out), tiny.states()
    refused = call("run", tiny.recipe, *overrides)
    assert refused.exit_code == 2
    error, where, fix = refused.stderr.splitlines()
    assert what in error
    assert str(tiny.out) in where
    assert "--overwrite" in fix
    assert (hash_folder(tiny.out), tiny.states()) == (before, states)
    # Without a train section the states are of the same converted folder.
    if overrides[0].startswith("convert."):
        assert call("run", tiny.recipe, *overrides, "train=null").exit_code == 2
        assert (hash_folder(tiny.out), tiny.states()) == (before, states)


def test_an_overwrite_is_asked_for_and_told(tiny: TinyPipeline) -> None:
    stop_after(4, tiny)
    done = call("run", tiny.recipe, "train.steps=8", "--overwrite")
    assert done.exit_code == 0, done.stderr
    assert "removed the states of another run: step-4, step-2" in done.stdout
    assert tiny.steps() == list(range(1, 9))
    # What fits is gone on with even so.
    shutil.rmtree(tiny.out / "uptrained")
    states = tiny.states()
    assert call("run", tiny.recipe, "train.steps=8", "--overwrite").exit_code == 0
    assert tiny.states() == states


def test_states_of_a_conversion_that_was_made_anew(tiny: TinyPipeline) -> None:
    stop_after(4, tiny)
    states = tiny.states()
    assert tiny.convert("--overwrite", "--method", "first").exit_code == 0
    refused = call("run", tiny.recipe, "convert.method=first")
    assert refused.exit_code == 2
    assert "step-4 is of another run: student: model.safetensors changed" in refused.stderr
    assert tiny.states() == states


def test_a_conversion_that_is_gone_is_made_again_for_its_states(tiny: TinyPipeline) -> None:
    stop_after(4, tiny)
    shutil.rmtree(tiny.out / "converted")
    refused = call("run", tiny.recipe, "train.steps=8")
    assert "steps was 6 and is 8" in refused.stderr
    assert not (tiny.out / "converted").exists()
    assert call("run", tiny.recipe).exit_code == 0
    assert tiny.steps() == list(range(1, 7))


def test_a_result_that_was_changed_by_hand_stays(tiny: TinyPipeline) -> None:
    assert call("run", tiny.recipe).exit_code == 0
    weights = tiny.out / "uptrained" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    before = hash_folder(tiny.out)
    with pytest.raises(TrainingError, match=r"model\.safetensors is not as it was made"):
        run(load_recipe(tiny.recipe), command="upcycle run")
    assert hash_folder(tiny.out) == before


def test_another_commands_folders_are_not_replaced(tiny: TinyPipeline) -> None:
    drawn = "convert.method=random"
    assert tiny.convert("--seed", 3, "--method", "random").exit_code == 0
    assert call("train", tiny.recipe, "convert.seed=3", drawn).exit_code == 0
    shutil.rmtree(tiny.out / "uptrained")
    shutil.rmtree(tiny.out / "training")
    before = hash_folder(tiny.out)
    refused = call("run", tiny.recipe, drawn)
    assert refused.exit_code == 2
    assert "seed was 3 and is 0" in refused.stderr
    assert hash_folder(tiny.out) == before
    source, converted = tiny.folder / "source", tiny.out / "converted"
    options = ["--max-tokens", 50, "--sequence-length", 32]
    made = call("eval", source, converted, "--out", tiny.out / "report", *options)
    assert made.exit_code == 0, made.stderr
    before = hash_folder(tiny.out)
    refused = call("run", tiny.recipe, "convert.seed=3", drawn, "train=null")
    assert refused.exit_code == 2
    assert f"{tiny.out / 'report'} is there and not of this run" in refused.stderr
    assert {name: hash_folder(tiny.out)[name] for name in before} == before


def test_a_trained_conversion_without_its_manifest_stays(tiny: TinyPipeline) -> None:
    stop_after(4, tiny)
    (tiny.out / "converted" / "upcycle.json").unlink()
    before = hash_folder(tiny.out)
    refused = call("run", tiny.recipe, "convert.kv_heads=4")
    assert refused.exit_code == 2
    assert "was trained (step-4, step-2)" in refused.stderr
    assert hash_folder(tiny.out) == before


def test_an_export_of_the_same_options_is_finished(tiny: TinyPipeline) -> None:
    assert call("run", tiny.recipe).exit_code == 0
    package = tiny.out / "model.mlpackage"
    assert call("export", tiny.out / "uptrained", package, "--context", 32).exit_code == 0
    before = hash_folder(package)
    done = call("run", tiny.recipe, "export.context=32", "--json")
    skipped = json.loads(done.stdout)["skipped"]
    assert skipped == ["convert", "train", "evaluate", "export"], done.stderr
    refused = call("run", tiny.recipe, "export.context=64")
    assert (
        "model.mlpackage is there and not of this run: context was 32 and is 64" in refused.stderr
    )
    assert hash_folder(package) == before
    done = call("run", tiny.recipe, "export.context=64", "--overwrite")
    assert done.exit_code == 0, done.stderr
    assert call("run", tiny.recipe, "export.context=32").exit_code == 0, "the run's own by now"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_convert_train_and_run_by_processes(tmp_path: Path, processes: int) -> None:
    tiny = tiny_pipeline(tmp_path, steps=40, checkpoint_every=1, keep_last=99)
    convert = ("convert", tiny.folder / "source", tiny.out / "converted", "--kv-heads", 2)
    out, err = start(*convert).communicate(timeout=300)
    assert "2 KV heads" in out, err
    kill(start("train", tiny.recipe, processes=processes), tiny, "step-3")
    states = tiny.states()
    process = start("run", tiny.recipe, processes=processes)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.splitlines()[:2] == ["convert: finished before", "train: running"], out
    assert tiny.states().items() >= states.items()
    assert tiny.steps() == list(range(1, 41))
    # Finished: nothing is trained.
    before, states = hash_folder(tiny.out), tiny.states()
    out, err = start("run", tiny.recipe).communicate(timeout=300)
    stages = ("convert", "train", "evaluate", "report")
    assert out.splitlines()[:4] == [f"{name}: finished before" for name in stages], err
    assert (hash_folder(tiny.out), tiny.states()) == (before, states)


@pytest.mark.slow
def test_a_finished_train_of_two_processes_and_a_run(tmp_path: Path) -> None:
    tiny = tiny_pipeline(tmp_path)
    assert tiny.convert().exit_code == 0
    process = start("train", tiny.recipe, processes=2)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    states = tiny.states()
    done = call("run", tiny.recipe, "--json")
    assert json.loads(done.stdout)["skipped"] == ["convert", "train"]
    assert tiny.states() == states


@pytest.mark.slow
def test_a_killed_run_of_two_processes_is_gone_on_with(tmp_path: Path) -> None:
    tiny = tiny_pipeline(tmp_path, steps=40, checkpoint_every=1, keep_last=99)
    kill(start("run", tiny.recipe, processes=2), tiny, "step-3")
    assert call("train", tiny.recipe, "--resume").exit_code == 0
    assert json.loads(call("run", tiny.recipe, "--json").stdout)["skipped"] == ["convert", "train"]
    assert tiny.steps() == list(range(1, 41))


def test_a_seed_by_which_nothing_is_drawn_is_no_difference(tiny: TinyPipeline) -> None:
    assert tiny.convert("--seed", 7).exit_code == 0
    assert call("train", tiny.recipe).exit_code == 0
    done = call("run", tiny.recipe)
    assert done.exit_code == 0, done.output
    assert "convert: finished before" in done.stdout


@pytest.mark.parametrize("options", [("--method", "random"), ("--calibration", "builtin")])
def test_a_seed_that_draws_is_a_difference(tmp_path: Path, options: tuple[str, str]) -> None:
    key, value = options[0].removeprefix("--"), options[1]
    section = ConvertOptions.model_validate(
        {"kv_heads": 2, key: [value] if key == "calibration" else value}
    )
    made = {**section.noted(), "seed": 7}
    manifest = Manifest.model_validate({"stage": "convert", "options": made})
    assert option_changes(manifest, section) == ["seed was 7 and is 0"]
    same = Manifest.model_validate({"stage": "convert", "options": {**made, "seed": 0}})
    assert option_changes(same, section) == []
