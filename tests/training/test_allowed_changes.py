"""`--allow-change`: a run goes on with another value, and says so in its log and manifest."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import TinyRun, tiny_run
from tests.training.test_train_commands import call, recipe  # noqa: F401 - a fixture
from upcycle.checkpoint.manifest import hash_file
from upcycle.errors import TrainingError
from upcycle.training.changes import allowed_keys
from upcycle.training.log import read_log
from upcycle.training.step import learning_rate

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)


def changed(run: TinyRun, keys: tuple[str, ...], **changes: Any) -> Any:
    """Four steps, and on to six with something changed."""
    run.train(steps=4)
    return run.train(resume=True, overwrite=True, allow_change=keys, **{"steps": 4, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_lower_rate_from_a_step_on(run: TinyRun) -> None:
    told: list[str] = []
    run.train(steps=6, name="out")
    (run.folder / "out-training" / "step-6").rename(run.folder / "gone")
    result = run.train(
        steps=6,
        resume=True,
        overwrite=True,
        learning_rate=1e-4,
        allow_change=["learning_rate"],
        tell=told.append,
    )
    rates = {row.step: row.lr for row in read_log(result.log) if row.lr is not None}
    before, after = run.recipe(), run.recipe(learning_rate=1e-4)
    assert rates == {
        step: learning_rate(step - 1, before if step <= 4 else after) for step in range(1, 7)
    }
    change = {"step": 4, "key": "learning_rate", "from": 1e-3, "to": 1e-4}
    (resumed,) = [row for row in read_log(result.log) if row.resumed is not None]
    assert resumed.changes == [change]
    manifest = json.loads((result.output / "upcycle.json").read_text())
    assert manifest["result"]["changes"] == [change]
    assert manifest["options"]["learning_rate"] == 1e-4
    rate = (
        "the learning rate follows cosine over all 6 steps: it was "
        f"{rates[4]:.3g} in step 4 and is {rates[5]:.3g} in step 5"
    )
    assert told[1:] == ["changed: learning_rate 0.001 → 0.0001 after step 4", rate]


def test_more_steps_are_the_longer_run_where_the_rate_is(run: TinyRun) -> None:
    """With a constant rate, four steps and four more are eight, to the last bit."""
    settings = {"schedule": "constant", "warmup_steps": 0}
    whole = run.train("whole", steps=8, **settings)
    run.train("parts", steps=4, **settings)
    parts = run.train(
        "parts", steps=8, resume=True, overwrite=True, allow_change=["steps"], **settings
    )
    name = "model.safetensors"
    assert hash_file(parts.output / name) == hash_file(whole.output / name)
    assert "changed: steps 4 → 8 after step 4" in parts.notes


@pytest.mark.parametrize("schedule", ["cosine", slow("linear"), slow("wsd")])
def test_more_steps_stretch_the_schedule(run: TinyRun, schedule: str) -> None:
    run.train(steps=4, schedule=schedule)
    result = run.train(
        steps=8, schedule=schedule, resume=True, overwrite=True, allow_change=["steps"]
    )
    rates = {row.step: row.lr for row in read_log(result.log) if row.lr is not None}
    longer = run.recipe(steps=8, schedule=schedule)
    assert [rates[step] for step in range(5, 9)] == [learning_rate(s, longer) for s in range(4, 8)]
    note = next(note for note in result.notes if note.startswith("the learning rate follows"))
    assert f"{schedule} over all 8 steps: it was {rates[4]:.3g} in step 4" in note


def test_steps_by_a_fraction(run: TinyRun) -> None:
    shares = {"steps": None, "source_steps": 40}
    run.train(fraction=0.1, **shares)
    result = run.train(fraction=0.15, **shares, resume=True, overwrite=True, allow_change=["steps"])
    assert result.steps == 6
    assert result.notes[1] == "changed: steps 4 → 6 after step 4"


def test_micro_batches_may_always_change(run: TinyRun) -> None:
    whole = run.train("whole", steps=6)
    run.train("parts", steps=6)
    (run.folder / "parts-training" / "step-6").rename(run.folder / "gone")
    parts = run.train("parts", steps=6, resume=True, overwrite=True, micro_batch_size=2)
    assert parts.notes == ("went on after step 4",)
    ours, theirs = weights(parts.output), weights(whole.output)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("betas", (0.8, 0.9)),
        slow("cross_entropy", 1.0),
        slow("distillation", 0.5),
        slow("max_grad_norm", 0.1),
        ("precision", "bf16"),
        slow("schedule", "linear"),
        ("seed", 3),
        slow("temperature", 2.0),
        slow("warmup_steps", 3),
        ("weight_decay", 0.1),
    ],
)
def test_what_else_may_change(run: TinyRun, key: str, value: Any) -> None:
    with pytest.raises(TrainingError) as refused:
        changed(run, (), **{key: value})
    assert refused.value.fix == (
        f"restore what changed, or go on with it: --resume --allow-change {key}"
    )
    result = run.train(steps=4, resume=True, overwrite=True, allow_change=[key], **{key: value})
    assert any(note.startswith(f"changed: {key} ") for note in result.notes)
    assert "no step is left to train otherwise: the run has 4, and all are done" in result.notes


def test_other_text_and_another_teacher(run: TinyRun) -> None:
    run.train(steps=4)
    run.text.write_text(run.text.read_text().replace("quick", "quiet"))
    again: dict[str, Any] = {"steps": 6, "resume": True, "overwrite": True}
    with pytest.raises(TrainingError, match="rows was") as refused:
        run.train(**again, allow_change=["steps"])
    assert refused.value.fix.endswith("--allow-change data")
    result = run.train(**again, allow_change=["steps", "data"])
    assert "changed: other rows after step 4" in result.notes
    (run.teacher / "model.safetensors").write_bytes(
        (run.student / "model.safetensors").read_bytes()
    )
    with pytest.raises(TrainingError, match="teacher was"):
        run.train(**again)
    assert "changed: other teacher after step 6" in (
        run.train(**again, allow_change=["teacher"]).notes
    )
    changes = json.loads((result.output / "upcycle.json").read_text())["result"]["changes"]
    assert [change["key"] for change in changes] == ["rows", "steps", "teacher"]
    assert [change["step"] for change in changes] == [4, 4, 6]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("learning-rate", "there is no 'learning-rate'"),
        ("train.stepz", "there is no 'stepz'"),
        ("student", "student cannot change: the state holds the weights of the student"),
        ("trainable", "trainable cannot change: the state holds the moments"),
        ("sequence_length", "sequence_length cannot change"),
        ("batch_size", "batch_size cannot change: rows are counted in batches"),
    ],
)
def test_what_cannot_change(run: TinyRun, key: str, what: str) -> None:
    with pytest.raises(TrainingError) as refused:
        run.train(resume=True, allow_change=[key])
    assert refused.value.what.startswith(what)
    assert refused.value.where == "--allow-change"
    assert "learning_rate" in refused.value.fix
    assert "micro_batch_size" in refused.value.fix


@pytest.mark.parametrize(
    "change", [{"trainable": "kv"}, {"sequence_length": 12}, {"batch_size": 4}]
)
def test_the_refusal_of_what_cannot_change_says_why(run: TinyRun, change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(TrainingError) as refused:
        changed(run, ("rows",), **change)
    assert refused.value.fix.startswith(f"restore {key} (")


def test_fewer_steps_than_are_done(run: TinyRun) -> None:
    with pytest.raises(TrainingError, match="step 4, behind the 3 steps asked for"):
        changed(run, ("steps",), steps=3)


def test_only_what_goes_on_can_change(run: TinyRun) -> None:
    with pytest.raises(TrainingError, match="only a run that goes on"):
        run.train(allow_change=["steps"])


def test_the_command(recipe: Path) -> None:  # noqa: F811
    assert call("train", recipe, "train.steps=2").exit_code == 0
    changes = ["train.steps=3", "train.learning_rate=0.0001", "--resume", "--overwrite"]
    refused = call("train", recipe, *changes)
    assert refused.exit_code == 2
    allowing = "--allow-change learning_rate --allow-change steps"
    assert f"go on with it: --resume {allowing}" in refused.stderr
    done = call("train", recipe, *changes, *allowing.split())
    assert done.exit_code == 0, done.stderr
    assert "changed: steps 2 → 3 after step 2" in done.stdout


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train.steps", "steps"),
        ("steps", "steps"),
        ("train.data", "data"),
        ("train.data.sources", "data"),
        ("data.sources", "data"),
        ("train.data.chat.assistant_only", "assistant_only"),
        ("train.micro_batch_size", "micro_batch_size"),
    ],
)
def test_a_key_may_have_its_section_before_it(given: str, meant: str) -> None:
    assert allowed_keys([given]) == [meant]


@pytest.mark.parametrize("given", ["train.batch_size", "train.", "convert.steps", "train.train"])
def test_what_is_no_key_of_the_section_is_refused(given: str) -> None:
    with pytest.raises(TrainingError):
        allowed_keys([given])


def test_a_run_goes_on_by_the_long_name(run: TinyRun) -> None:
    result = changed(run, ("train.learning_rate",), learning_rate=1e-4)
    assert result.steps == 4
