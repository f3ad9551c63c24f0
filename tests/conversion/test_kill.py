"""kill -9 at any moment leaves no output, and the next run succeeds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.conversion.run import convert

# Stops for good when the given number of bytes was written, so that the parent can kill it there.
CHILD = """
import sys, time
from upcycle.conversion.run import convert
source, output, moment = sys.argv[1], sys.argv[2], float(sys.argv[3])

def watch(progress):
    if progress.done >= moment * progress.total:
        print("reached", flush=True)
        time.sleep(60)

convert(source, output, kv_heads=2, watch=watch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.01, 0.3, 0.7, 1.0])
def test_a_killed_conversion_leaves_nothing_and_the_next_succeeds(
    tmp_path: Path, moment: float
) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    command = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "out"), str(moment)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n"
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", kv_heads=2)
    convert(source, tmp_path / "fresh", kv_heads=2)
    assert hash_folder(tmp_path / "out") == hash_folder(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "source"]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_killing_at_any_time_leaves_all_or_nothing(tmp_path: Path, delay: float) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    command = [sys.executable, "-m", "upcycle", "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen([*command, "--kv-heads", "2", "--quiet"]) as child:
        time.sleep(delay)
        child.kill()
    convert(source, tmp_path / "fresh", kv_heads=2)
    if (tmp_path / "out").exists():
        assert hash_folder(tmp_path / "out") == hash_folder(tmp_path / "fresh")
    else:
        convert(source, tmp_path / "out", kv_heads=2)
        assert hash_folder(tmp_path / "out") == hash_folder(tmp_path / "fresh")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "source"]
