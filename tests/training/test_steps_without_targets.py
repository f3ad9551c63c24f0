"""Steps whose rows carry no loss are passed over: no optimiser step, no decay, and it is said."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import TinyRun, tiny_run
from tests.training.test_chat_training import TEMPLATE
from tests.training.test_several_processes import finish, recipe_file, start
from upcycle.checkpoint.manifest import hash_file
from upcycle.data.packing import IGNORED, batch_rows
from upcycle.errors import DataError
from upcycle.training.log import read_log
from upcycle.training.rows import check_text, training_rows

SETTINGS: dict[str, Any] = {"batch_size": 2, "micro_batch_size": 1, "steps": 30}


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    """Chats of which every fourth has an assistant."""
    found = tiny_run(tmp_path)
    for folder in (found.student, found.teacher):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return chats(found, lambda number: number % 4 == 0)


def chats(run: TinyRun, is_answered: Any) -> TinyRun:
    rows = []
    for number in range(60):
        messages = [{"role": "user", "content": f"ask {number}"}]
        if is_answered(number):
            messages.append({"role": "assistant", "content": "yes" * (number % 3 + 1)})
        rows.append(json.dumps({"messages": messages}) + "\n")
    run.text.write_text("".join(rows))
    return run


def settings(run: TinyRun, **changes: Any) -> dict[str, Any]:
    data = {"sources": [{"path": run.text}], "chat": {"assistant_only": True}}
    return {**SETTINGS, "data": data, "weight_decay": 0.5, **changes}


def expected(run: TinyRun) -> list[int]:
    """The steps, counted from 1, in whose rows nothing is a target."""
    rows, _ = training_rows(run.student, run.recipe(**settings(run)))
    found = []
    for step in range(30):
        chosen = batch_rows(step, batch_size=2, num_rows=len(rows), seed=0)
        if bool((rows.labels[chosen] == IGNORED).all()):
            found.append(step + 1)
    assert 5 < len(found) < 25
    return found


def skipped(log: Path) -> list[int]:
    return [row.step for row in read_log(log) if row.skipped is not None]


def test_they_move_nothing_and_are_said(run: TinyRun) -> None:
    told: list[str] = []
    result = run.train(**settings(run, checkpoint_every=1, keep_last=99), tell=told.append)
    steps = expected(run)
    assert skipped(result.log) == steps
    (row, *_) = [row for row in read_log(result.log) if row.skipped is not None]
    assert row.skipped == "no token of its rows carries a loss"
    note = f"{len(steps)} of the steps were skipped, because no token of its rows carries a loss"
    assert any(each.startswith(note) for each in result.notes)
    for step in steps:
        states = [run.folder / "out-training" / f"step-{n}" for n in (step - 1, step)]
        if step == 1:
            continue
        for name in ("weights.safetensors", "moments.safetensors"):
            before, after = (load_file(folder / name) for folder in states)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
    rows, _ = training_rows(run.student, run.recipe(**settings(run)))
    tokens = rows.labels.numel()
    share = f"{rows.num_targets:,} of {tokens:,} tokens ({rows.num_targets / tokens:.1%})"
    assert told == [f"training text: {share} are targets"]


def test_a_resumed_run_skips_the_same(run: TinyRun) -> None:
    whole = run.train("whole", **settings(run))
    (run.folder / "whole-training" / "step-30").rename(run.folder / "gone")
    before = hash_file(whole.output / "model.safetensors")
    again = run.train("whole", **settings(run), resume=True, overwrite=True)
    assert hash_file(again.output / "model.safetensors") == before
    assert skipped(again.log) == expected(run)


@pytest.mark.slow
def test_two_processes_skip_the_same(run: TinyRun) -> None:
    options = settings(run, learning_rate=1e-5)
    one = finish(start(recipe_file(run, "one", **options)))
    two = finish(start(recipe_file(run, "two", **options), processes=2))
    assert skipped(Path(one["log"])) == skipped(Path(two["log"])) == expected(run)
    ours, theirs = (load_file(Path(r["output"]) / "model.safetensors") for r in (one, two))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6


def test_no_target_at_all_is_refused_before_anything(run: TinyRun) -> None:
    chats(run, lambda number: False)
    recipe = run.recipe(**settings(run))
    for look in (check_text, training_rows):
        with pytest.raises(DataError, match="carries a loss"):
            look(run.student, recipe)
    with pytest.raises(DataError, match="carries a loss"):
        run.train(**settings(run))
    assert not list((run.folder / "out-training").glob("*"))


def test_targets_in_the_held_out_rows_alone_are_refused(run: TinyRun) -> None:
    chats(run, lambda number: number == 59)
    with pytest.raises(DataError, match=r"none of \d+ rows of 16 tokens carries a loss"):
        training_rows(run.student, run.recipe(**settings(run)))


def test_the_check_reads_on_until_it_finds_one(run: TinyRun) -> None:
    chats(run, lambda number: number in (45, 59))  # the last one is held out
    found = check_text(run.student, run.recipe(**settings(run)))
    assert "only the first 46 documents were looked at" in found
    assert re.search(r"; 4 of [\d,]+ tokens \(0\.\d%\) are targets$", found), found


def test_a_run_whose_every_step_has_none_is_refused(run: TinyRun) -> None:
    """One answer in the text, and too few steps to reach its row."""
    chats(run, lambda number: number in (30, 59))  # the last one is held out
    found = [seed for seed in range(8) if not reached(run, seed)]
    assert found
    recipe = run.recipe(**settings(run, steps=1, seed=found[0]))
    for look in (training_rows, check_text):
        with pytest.raises(DataError) as caught:
            look(run.student, recipe)
        assert re.match(
            r"none of the rows that 1 steps train on carries a loss: only \d+ of [\d,]+ tokens "
            r"\(0\.\d%\) are targets$",
            caught.value.what,
        )
        assert caught.value.where == f"recipe, train.data.sources: {run.text.name}"
        assert "train more steps" in caught.value.fix
    with pytest.raises(DataError, match="carries a loss"):
        run.train(**settings(run, steps=1, seed=found[0]))
    assert not list((run.folder / "out-training").glob("*"))


def reached(run: TinyRun, seed: int) -> bool:
    """Whether the first step's rows have a target, row by row."""
    rows, _ = training_rows(run.student, run.recipe(**settings(run, steps=1000)))
    chosen = batch_rows(0, batch_size=2, num_rows=len(rows), seed=seed)
    return any(label != IGNORED for row in chosen for label in rows.labels[row].tolist())
