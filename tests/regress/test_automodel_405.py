"""SIGTERM of a cluster's scheduler loses the run (NVIDIA-NeMo/Automodel#405).

Several processes agree on the step after which they stop, whichever of them got the signal.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import stops
from tests.training.runs import tiny_run
from tests.training.test_several_processes import recipe_file
from upcycle.training.log import read_log
from upcycle.training.state import find_state

pytestmark = pytest.mark.slow
SLOW_STEPS = """
import os
Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
import upcycle.training.step as step
real = step.Trainer.step
def slow(self, number):
    found = real(self, number)
    time.sleep(0.05)
    if number == 3 and os.environ["RANK"] == "0":
        reached(seconds=0.3)
    return found
step.Trainer.step = slow
import upcycle.cli
real_main = upcycle.cli.main
def main():
    try:
        real_main()
    except SystemExit as end:
        Path("code" + os.environ["RANK"]).write_text(str(end.code))
        raise
upcycle.cli.main = main
"""


@pytest.mark.parametrize("target", ["0", "1", "launcher"])
def test_all_stop_after_the_same_step(tmp_path: Path, target: str) -> None:
    recipe = recipe_file(tiny_run(tmp_path), "run", steps=400, checkpoint_every=300)
    process = stops.begin(tmp_path, SLOW_STEPS, "train", recipe, processes=2)
    stops.wait_until_reached(process, tmp_path)
    began = time.monotonic()
    if target == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(int((tmp_path / f"pid{target}").read_text()), signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    codes = [(tmp_path / f"code{rank}").read_text() for rank in (0, 1)]
    assert codes == ["143", "143"], err
    found = find_state(tmp_path / "run" / "training")
    assert found is not None
    steps = [row.step for row in read_log(tmp_path / "run" / "training" / "log.jsonl")]
    assert found.state.step == steps[-1] < 400
    line = next(line for line in err.splitlines() if line.startswith("stopped by "))
    assert line == (
        f"stopped by SIGTERM; the state after step {found.state.step} is saved; "
        f"resume with: torchrun --nproc-per-node=2 -m upcycle train {recipe} --resume"
    )
    assert err.count("stopped by ") == 1
    assert stops.names(tmp_path / "run" / "training") == {f"step-{found.state.step}", "log.jsonl"}
    state = json.loads((found.folder / "state.json").read_text())
    assert state["step"] == found.state.step
