"""kill -9 at any moment leaves no output; the next run succeeds, anew or where it stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder

# Says when the imports are over, and slows the work down so that a kill meets every part of it;
# at a given fraction it stops for good, so that the parent can kill it there.
CHILD = """
import os, sys, time
from pathlib import Path
from upcycle.conversion.convert import convert
from upcycle.options.convert import ConvertOptions
source, output, moment, resume = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:] != []

def watch(progress):
    time.sleep(0.002)
    if progress.done >= moment * progress.total:
        print("reached", flush=True)
        time.sleep(60)

fsync = os.fsync
def slow_fsync(descriptor):
    time.sleep(0.002)
    fsync(descriptor)

os.fsync = slow_fsync
print("begun", flush=True)
convert(source, output, ConvertOptions(kv_heads=2), resume=resume, watch=watch)
print("done", flush=True)
"""
FIXED = [0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.97, 1.0]
NEVER = 2.0


def kill(
    source: Path, output: Path, *, moment: float = NEVER, delay: float = 0, resume: bool
) -> None:
    """Run a conversion and kill it, `delay` seconds after its imports or at `moment`."""
    arguments = [str(source), str(output), str(moment), *(["resume"] if resume else [])]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        if moment < NEVER:
            assert child.stdout.readline() == "reached\n"
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode in (0, -signal.SIGKILL)


def assert_same_bytes(found: Path, expected: Path) -> None:
    assert sorted(path.name for path in found.iterdir()) == sorted(
        path.name for path in expected.iterdir()
    )
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_thirty_kills_and_resumes_give_thirty_identical_results(tmp_path: Path) -> None:
    """Ten at fixed shares of the work, ten at random ones, ten at random times; some twice."""
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="40KB", num_hidden_layers=4)
    begin = time.perf_counter()
    convert(source, tmp_path / "fresh", kv_heads=2, watch=lambda _: time.sleep(0.002))
    duration = 1.2 * (time.perf_counter() - begin)
    moments = random.Random(0)
    resumed = []
    for run in range(30):
        output = tmp_path / f"out-{run}"
        if run < 20:
            moment = FIXED[run] if run < len(FIXED) else moments.random()
            kill(source, output, moment=moment, resume=False)
            assert not output.exists()
        else:
            kill(source, output, delay=moments.uniform(0, duration), resume=False)
            if run % 3 == 0 and not output.exists():
                kill(source, output, delay=moments.uniform(0, duration), resume=True)
        if not output.exists():
            resumed.append(convert(source, output, kv_heads=2, resume=True).resumed_shards)
        assert_same_bytes(output, tmp_path / "fresh")
        assert not (tmp_path / f".out-{run}.partial").exists()
    assert len(resumed) >= 20
    assert len({*resumed}) >= 5, "the kills met different states"


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.01, 0.3, 0.7, 1.0])
def test_without_resume_the_next_run_starts_anew(tmp_path: Path, moment: float) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    kill(source, tmp_path / "out", moment=moment, resume=False)
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "out", kv_heads=2).resumed_shards == 0
    convert(source, tmp_path / "fresh", kv_heads=2)
    assert hash_folder(tmp_path / "out") == hash_folder(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "source"]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_killing_the_command_at_any_time_leaves_all_or_nothing(
    tmp_path: Path, delay: float
) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    command = [sys.executable, "-m", "upcycle", "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen([*command, "--kv-heads", "2", "--quiet"]) as child:
        time.sleep(delay)
        child.kill()
    convert(source, tmp_path / "fresh", kv_heads=2)
    if not (tmp_path / "out").exists():
        convert(source, tmp_path / "out", kv_heads=2, resume=True)
    assert_same_bytes(tmp_path / "out", tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "source"]
