"""Exit codes, three-line errors, and what `--json` and `--quiet` print."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import stops
from tests.tiny import add_older_keys, convert, tiny_checkpoint
from upcycle.cli.app import COMMANDS
from upcycle.cli.console import Console, Outcome, _run
from upcycle.conversion.verify import verify
from upcycle.errors import UpcycleError
from upcycle.stopping import Stopped


def upcycle(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upcycle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_older_keys(tiny_checkpoint(tmp_path_factory.mktemp("cli") / "source"))


def test_help_lists_every_command() -> None:
    done = upcycle("--help")
    assert done.returncode == 0
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(COMMANDS) <= listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_shared_options_and_an_example(name: str) -> None:
    done = upcycle(name, "--help")
    assert done.returncode == 0, done.stderr
    for option in ("--json", "--quiet", "--debug"):
        assert option in done.stdout
    assert f"Example: upcycle {name}" in done.stdout


def test_json_is_the_only_thing_on_stdout(source: Path, tmp_path: Path) -> None:
    done = upcycle("convert", source, tmp_path / "out", "--kv-heads", 2, "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["output"] == str(tmp_path / "out")
    assert document["manifest"]["options"]["kv_heads"] == 2
    assert done.stderr == ""


def test_quiet_prints_nothing(source: Path, tmp_path: Path) -> None:
    done = upcycle("convert", source, tmp_path / "out", "--kv-heads", 2, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_failed_check_is_exit_code_1(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, kv_heads=2)
    assert verify(source, out).passed
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    done = upcycle("verify", source, out)
    assert done.returncode == 1
    assert "failed: config.json" in done.stdout


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_bad_request_is_three_lines_and_exit_code_2(
    source: Path, tmp_path: Path, json_option: list[str]
) -> None:
    done = upcycle("convert", source, tmp_path / "out", "--kv-heads", 3, *json_option)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: cannot make 3 KV heads from 8 query heads and 8 KV heads",
        "  where: --kv-heads",
        "  fix: choose one of 1, 2, 4, 8",
    ]
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_exit_code_2(source: Path) -> None:
    assert upcycle("plan", source, "--heads", 2).returncode == 2


def test_our_own_bug_is_exit_code_70_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> Outcome:
        raise KeyError("lost")

    assert _run(Console(json=False, quiet=False), False, broken) == 70
    printed = capsys.readouterr()
    assert "internal error: KeyError: 'lost'" in printed.err
    assert "Traceback" not in printed.err
    with pytest.raises(KeyError):
        _run(Console(json=False, quiet=False), True, broken)


def test_a_signal_at_a_safe_point_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> Outcome:
        raise Stopped(signal.SIGTERM, "the state after step 3 is saved")

    for debug in (False, True):
        assert _run(Console(json=True, quiet=True), debug, stopped) == 143
        assert capsys.readouterr().err == "stopped by SIGTERM; the state after step 3 is saved\n"


def test_ctrl_c_without_handlers_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Outcome:
        raise KeyboardInterrupt

    assert _run(Console(json=False, quiet=False), False, interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_and_a_code_of_its_own(
    source: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    setup = "import upcycle.planning as m\nm.plan = reached"
    done = stops.stop(tmp_path, setup, "plan", source, "--kv-heads", 2, "--json", number=number)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"stopped by {number.name}; nothing half-written is kept\n"


def test_debug_shows_the_traceback_of_an_error() -> None:
    def refused() -> Outcome:
        raise UpcycleError("what", where="where", fix="fix")

    assert _run(Console(json=True, quiet=False), False, refused) == 2
    with pytest.raises(UpcycleError):
        _run(Console(json=True, quiet=False), True, refused)


def test_only_the_first_process_of_torchrun_prints(source: Path) -> None:
    command = [sys.executable, "-m", "upcycle", "plan", str(source), "--kv-heads", "2"]
    printed = {
        rank: subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "RANK": rank}
        ).stdout
        for rank in ("0", "1")
    }
    assert "model.norm.weight" in printed["0"]
    assert printed["1"] == ""


def test_plan_reads_no_weight(source: Path, tmp_path: Path) -> None:
    """A source whose data is gone but whose header and size are right can still be planned."""
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for path in source.iterdir():
        (hollow / path.name).write_bytes(path.read_bytes())
    weights = hollow / "model.safetensors"
    data = weights.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:header] + bytes(len(data) - header))
    done = upcycle("plan", hollow, "--kv-heads", 2, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["config_edits"] == {"num_key_value_heads": 2}


def test_a_reader_that_has_seen_enough_is_no_bug(source: Path) -> None:
    command = (
        f"{sys.executable} -m upcycle plan {source} --kv-heads 2 | head -n 1; echo $PIPESTATUS"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_terminal_without_utf_8_is_no_bug(source: Path) -> None:
    command = [sys.executable, "-m", "upcycle", "plan", str(source), "--kv-heads", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"8 ? 2 KV heads" in done.stdout


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome({"rows": [{"measured": float("nan")}], "limit": 1.5})
    assert _run(Console(json=True, quiet=False), False, lambda: outcome) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": [{"measured": None}], "limit": 1.5}
