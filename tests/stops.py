"""Commands in processes of their own, slowed down so that a signal meets a given moment."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Says "reached" at the moment and stays there for some seconds, as slow work would.
_PROGRAM = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
sys.path.insert(0, {root!r})

def reached(*_, seconds=60, **__):
    Path({flag!r} + ".new").touch()
    Path({flag!r} + ".new").rename({flag!r})
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)

from upcycle import stopping
{setup}
from upcycle.cli import main
main()
"""


def begin(
    folder: Path, setup: str, *arguments: object, processes: int = 1
) -> "subprocess.Popen[str]":
    """Start `upcycle` with some lines of Python run first, which call `reached()` somewhere."""
    program = folder / "program.py"
    flag = folder / "reached"
    flag.unlink(missing_ok=True)
    program.write_text(_PROGRAM.format(root=str(ROOT), flag=str(flag), setup=setup))
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc-per-node={processes}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [*launcher, str(program), *map(str, arguments)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_reached(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Until the process calls `reached()`; it must not end before."""
    while not (folder / "reached").exists():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.02)


def stop(
    folder: Path,
    setup: str,
    *arguments: object,
    number: signal.Signals = signal.SIGTERM,
) -> "subprocess.CompletedProcess[str]":
    """Run a command up to the moment and send it one signal there."""
    process = begin(folder, setup, *arguments)
    wait_until_reached(process, folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_line(process: "subprocess.Popen[str]", seconds: float) -> bool:
    """Whether the process says something on stderr within the time."""
    return bool(select.select([process.stderr], [], [], seconds)[0])


def names(folder: Path, *, besides: Sequence[str] = ()) -> set[str]:
    """What lies in a folder, hidden or not, beside what the tests put there."""
    mine = {"program.py", "reached", "tmp", *besides}
    return {path.name for path in folder.iterdir()} - mine
