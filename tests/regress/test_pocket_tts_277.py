"""A stopped training run loses what it did since its last state (kyutai-labs/pocket-tts#277).

SIGTERM and Ctrl-C end training at the next step boundary, with a state there, and the run goes on
from it to the very same weights. Whatever the moment, nothing half-written stays.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import stops
from tests.training.runs import tiny_run
from tests.training.test_several_processes import recipe_file
from upcycle import stopping
from upcycle.checkpoint.manifest import hash_file
from upcycle.training.state import find_state, state_folders

AT_STEP = """
import upcycle.training.step as step
real = step.Trainer.step
def slow(self, number):
    found = real(self, number)
    if number == {step}:
        reached(seconds={seconds})
    return found
step.Trainer.step = slow
"""
SLOW_SAVE = """
stopping.LAUNCHER_PATIENCE = {patience}
import safetensors.torch as storage
real = storage.save_file
def slow(tensors, path):
    if "step-2" not in str(path):
        real(tensors, path)
        reached()
    return real(tensors, path)
storage.save_file = slow
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return recipe_file(tiny_run(tmp_path), "run", steps=8, checkpoint_every=2)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The weights of a run that nobody stopped."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    return tiny_run(folder).train(steps=8).output / "model.safetensors"


def go_on(line: str, folder: Path) -> None:
    """Run the command that the last line advises."""
    words = shlex.split(line.partition("resume with: ")[2])
    assert words[0] == "upcycle"
    environment = {"PYTHONPATH": str(stops.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_state_at_the_step_boundary(
    recipe: Path, whole: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    setup = AT_STEP.format(step=2, seconds=0.5)
    done = stops.stop(tmp_path, setup, "train", recipe, number=number)
    assert done.returncode == code, done.stderr
    assert done.stderr == (
        f"stopped by {number.name}; the state after step 3 is saved; "
        f"resume with: upcycle train {recipe} --resume\n"
    )
    work = tmp_path / "run" / "training"
    assert stops.names(work) == {"step-3", "step-2", "log.jsonl"}
    found = find_state(work)
    assert found is not None
    assert found.state.step == 3
    go_on(done.stderr, tmp_path)
    result = tmp_path / "run" / "uptrained" / "model.safetensors"
    assert hash_file(result) == hash_file(whole)


def test_a_save_that_takes_too_long_leaves_the_last_whole_state(
    recipe: Path, tmp_path: Path
) -> None:
    process = stops.begin(tmp_path, SLOW_SAVE.format(patience=6), "train", recipe)
    stops.wait_until_reached(process, tmp_path)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 6
    assert process.returncode == 143
    assert err == (
        "stopped by SIGTERM; the state after step 4 could not be saved within 6 s; the last whole "
        f"state is that of step 2; resume with: upcycle train {recipe} --resume\n"
    )
    assert stops.names(tmp_path / "run" / "training") == {"step-2", "log.jsonl"}
    go_on(err, tmp_path)


def test_launchers_wait_for_thirty_seconds() -> None:
    assert stopping.LAUNCHER_PATIENCE == 30


def test_a_second_signal_ends_at_once(recipe: Path, tmp_path: Path) -> None:
    process = stops.begin(tmp_path, SLOW_SAVE.format(patience=60), "train", recipe)
    stops.wait_until_reached(process, tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 2
    assert process.returncode == 130
    assert err == "stopped at once by a second signal\n"
    assert [path.name for path in state_folders(tmp_path / "run" / "training")] == ["step-2"]


MOMENTS = {
    "loading": "import upcycle.training.loop as m\nm.check_isolation = reached",
    "tokenising": "import upcycle.training.loop as m\nm.training_rows = reached",
    "importing": """
import builtins
real = builtins.__import__
def slow(name, *rest, **more):
    if name == "accelerate":
        try:
            reached()
        except BaseException:
            pass
    return real(name, *rest, **more)
builtins.__import__ = slow
""",
    "first evaluation": """
import upcycle.training.step as step
step.Trainer.held_out = reached
""",
    "writing the result": """
import upcycle.training.result as result
real = result.rewrite
def slow(*arguments):
    found = real(*arguments)
    reached()
    return found
result.rewrite = slow
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_where_nothing_can_be_saved(recipe: Path, tmp_path: Path, moment: str) -> None:
    number = signal.SIGINT if moment == "importing" else signal.SIGTERM
    before = {path.name for path in tmp_path.iterdir()}
    done = stops.stop(tmp_path, MOMENTS[moment], "train", recipe, number=number)
    assert done.returncode == 128 + number, done.stderr
    advice = f"resume with: upcycle train {recipe} --resume"
    assert done.stderr == f"stopped by {number.name}; {advice}\n"
    assert stops.names(tmp_path) == before
    assert stops.names(tmp_path / "run") <= {"converted", "training"}
    if moment == "writing the result":
        assert stops.names(tmp_path / "run" / "training") == {"step-8", "step-6", "log.jsonl"}
        go_on(done.stderr, tmp_path)


def test_an_evaluation_on_the_way_is_finished_and_saved(recipe: Path, tmp_path: Path) -> None:
    setup = """
import upcycle.training.step as step
real = step.Trainer.held_out
calls = []
def slow(self, rows):
    calls.append(1)
    if len(calls) == 2:
        reached(seconds=0.5)
    return real(self, rows)
step.Trainer.held_out = slow
"""
    done = stops.stop(tmp_path, setup, "train", recipe)
    assert done.returncode == 143
    assert "the state after step 3 is saved" in done.stderr
    log = (tmp_path / "run" / "training" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["heldout_nll"] > 0


def test_a_run_goes_on_by_itself(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "converted").unlink()
    recipe.write_text(recipe.read_text() + "evaluate:\n  sequence_length: 64\n  max_tokens: 200\n")
    done = stops.stop(tmp_path, AT_STEP.format(step=2, seconds=0.5), "run", recipe)
    assert done.returncode == 143, done.stderr
    *warnings, last = done.stderr.splitlines()
    assert all(line.startswith("warning: ") for line in warnings)
    assert last == (
        "stopped by SIGTERM; the state after step 3 is saved; finished stages and training states "
        f"are kept; go on with: upcycle run {recipe}"
    )
    assert stops.names(tmp_path / "run") == {"converted", "training", "stages.json"}


def test_a_library_call_keeps_pythons_own_handlers(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tiny_run(tmp_path).train(steps=1)
    assert stopping.received() is None
    with stopping.handling(speaks=False):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
