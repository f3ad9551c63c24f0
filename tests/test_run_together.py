"""`torchrun -m upcycle run`: the first process does everything, and all of them train."""

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed import DistError, HashStore

from tests.pipeline_runs import TinyPipeline, call, start, tiny_pipeline
from upcycle.checkpoint.manifest import hash_folder
from upcycle.errors import TrainingError
from upcycle.training.team import Team

if TYPE_CHECKING:
    import subprocess

LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", "0", "-m"),
    ),
}


def teams(size: int) -> list[Team]:
    store = HashStore()
    return [Team(store, rank, size) for rank in range(size)]


def test_the_others_wait_for_words_and_end_with_the_firsts_code() -> None:
    first, *others = teams(3)
    heard: list[list[str | None]] = [[], []]
    codes: list[int] = [-1, -1]

    def follow(index: int) -> None:
        while (word := others[index].wait()) is not None:
            heard[index].append(word)
        codes[index] = others[index].end(0)

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    first.tell("train")
    first.tell("train")
    assert first.end(2) == 2
    for thread in threads:
        thread.join(timeout=10)
    assert heard == [["train", "train"]] * 2
    assert codes == [2, 2]


def test_a_process_that_fails_alone_says_so() -> None:
    first, other = teams(2)
    assert not other.has_ended(0.2)
    assert other.end(70) == 70
    ended = threading.Thread(target=first.end, args=(2,))
    ended.start()
    assert other.has_ended(5)
    assert other.end(70) == 2
    ended.join(timeout=10)


def test_no_wait_is_a_collective_that_times_out() -> None:
    """The store's own time limit is no limit of the waiting."""
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    first, other = Team(store, 0, 2), Team(store, 1, 2)
    threading.Timer(0.5, first.tell, ["train"]).start()
    assert other.wait() == "train"


class LostStore(HashStore):
    """The store of a launcher that was killed."""

    def check(self, keys: list[str]) -> bool:
        raise DistError("connection reset by peer")

    def get(self, key: str) -> bytes:
        raise DistError("connection reset by peer")

    def set(self, key: str, value: str) -> None:
        raise DistError("connection reset by peer")


def test_processes_whose_launcher_is_gone() -> None:
    first, other = (Team(LostStore(), rank, 2) for rank in range(2))
    assert first.end(0) == 0, "its work is done"
    with pytest.raises(TrainingError, match="the launcher is gone"):
        other.wait()
    assert not other.has_ended()
    assert other.end(2) == 2
    assert other.end(0) == 0


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPipeline:
    return tiny_pipeline(tmp_path)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_run_of_two_processes(tiny: TinyPipeline, name: str) -> None:
    code, out, err = finish(start("run", tiny.recipe, launcher=LAUNCHERS[name]))
    assert code == 0, err
    lines = out.splitlines()
    stages = ("convert", "train", "evaluate", "report")
    announced = [line for line in lines if line.endswith(": running")]
    assert announced == [f"{stage}: running" for stage in stages], "one process prints"
    assert sum(line.startswith("report ") for line in lines) == 1
    assert tiny.steps() == list(range(1, 7))
    alone = call("run", tiny.recipe, f"output={tiny.folder / 'alone'}", "--json")
    losses = [
        model["nll"]
        for out in (tiny.out, tiny.folder / "alone")
        for model in json.loads((out / "report" / "report.json").read_text())["comparison"][
            "models"
        ]
    ]
    assert alone.exit_code == 0
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    before = hash_folder(tiny.out)
    code, out, err = finish(start("run", tiny.recipe, launcher=LAUNCHERS[name]))
    assert code == 0, err
    assert out.splitlines()[:4] == [f"{stage}: finished before" for stage in stages]
    assert hash_folder(tiny.out) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["convert.kv_heads=3"], "cannot make 3 KV heads"),
        (["trian.steps=3"], "trian"),
        (["train.batch_size=2"], "batch_size 2 cannot be shared by 2 processes"),
        (["train.steps=9"], "steps was 6 and is 9"),
    ],
)
def test_an_error_is_told_once(tiny: TinyPipeline, overrides: list[str], message: str) -> None:
    if message.startswith("steps was"):
        assert call("run", tiny.recipe).exit_code == 0
    command = "train" if message.startswith("batch_size") else "run"
    if command == "train":
        assert tiny.convert().exit_code == 0
    code, out, err = finish(start(command, tiny.recipe, *overrides, processes=2))
    assert code != 0
    assert err.count(message) == 1, err
    assert "exitcode  : 2" in err, err
    assert "internal error" not in err
    assert "error" not in out


@pytest.mark.slow
def test_a_failed_margin_ends_all_with_1(tiny: TinyPipeline) -> None:
    code, _, err = finish(start("run", tiny.recipe, "evaluate.margins.kl_mean=1e-9", processes=2))
    assert code == 1
    assert "exitcode  : 1" in err
    assert "exitcode  : -15" not in err
