"""A command that is stopped leaves nothing half-written (huggingface/nanotron#21, for training).

Ctrl-C and SIGTERM in any command: no staging folder, no temporary file, one line, no traceback; but
what a stopped conversion had finished stays for --resume.
"""

import functools
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import stops
from tests.tiny import add_older_keys, convert, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NOTHING = "nothing half-written is kept"
AFTER = """
import {module} as module
real = module.{name}
def slow(*arguments, **options):
    found = real(*arguments, **options)
    reached()
    return found
module.{name} = slow
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    made = tiny_checkpoint(folder / "source", max_shard_size="40KB", num_hidden_layers=4)
    return add_older_keys(made)  # without them a conversion warns


def after(module: str, name: str) -> str:
    return AFTER.format(module=module, name=name)


def check(
    folder: Path, setup: str, *arguments: object, number: signal.Signals = signal.SIGTERM
) -> str:
    """Stop a command; its line. It must leave the folder and the one for temporary files alone."""
    before = stops.names(folder)
    done = stops.stop(folder, setup, *arguments, number=number)
    assert done.returncode == 128 + number, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"stopped by {number.name}; ")
    assert done.stderr.count("\n") == 1
    left = stops.names(folder) - before
    assert not list((folder / "tmp").iterdir())
    assert {name for name in left if not name.startswith(".out.partial")} == set()
    return done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_conversion_goes_on_with_resume(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The work is done by threads, while the main one waits for them."""
    setup = """
import upcycle.conversion.shards as shards
real = shards.ShardWork._note
def slow(self, shard):
    real(self, shard)
    if len(self.output_hashes) == 3:
        reached()
shards.ShardWork._note = slow
"""
    output = tmp_path / "out"
    line = check(tmp_path, setup, "convert", source, output, "--kv-heads", 2, number=number)
    assert (tmp_path / ".out.partial").is_dir()
    assert "what is finished is kept; go on with: upcycle convert " in line
    words = shlex.split(line.partition("go on with: ")[2])
    assert words[-1] == "--resume"
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={"PYTHONPATH": str(stops.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resumed: 3 of" in done.stdout
    convert(source, tmp_path / "fresh", kv_heads=2)
    assert hash_folder(output) == hash_folder(tmp_path / "fresh")


def test_a_conversion_that_wrote_nothing_yet(source: Path, tmp_path: Path) -> None:
    setup = after("upcycle.conversion.convert", "plan")
    line = check(tmp_path, setup, "convert", source, tmp_path / "out", "--kv-heads", 2)
    assert line == f"stopped by SIGTERM; {NOTHING}\n"
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    "moment",
    [
        after("upcycle.report.render", "write_report"),
        slow(after("upcycle.report.build", "build_report")),
        slow("import upcycle.evaluation.compare as m\nm.evaluate = reached"),
    ],
)
def test_an_evaluation(source: Path, tmp_path: Path, moment: str) -> None:
    arguments = ("--out", tmp_path / "report", "--max-tokens", 200, "--sequence-length", 64)
    line = check(tmp_path, moment, "eval", source, source, *arguments)
    assert line == f"stopped by SIGTERM; {NOTHING}\n"


def test_a_sweep(source: Path, tmp_path: Path) -> None:
    setup = after("upcycle.pipeline.sweep", "convert")
    arguments = ("--kv-heads", 2, "--max-tokens", 200, "--sequence-length", 64)
    check(tmp_path, setup, "sweep", source, *arguments, number=signal.SIGINT)


@pytest.mark.parametrize(
    "moment",
    [
        slow(after("upcycle.export.saving", "convert_decoder")),
        # coremltools has written its temporary files, and saves the package.
        """
from upcycle.export.quiet import quiet_coremltools
with quiet_coremltools():
    import coremltools.models.model as model
real = model.MLModel.save
def slow(self, *arguments):
    real(self, *arguments)
    reached()
model.MLModel.save = slow
""",
        # Somebody who takes every exception for his own.
        slow("""
from upcycle.export.quiet import quiet_coremltools
with quiet_coremltools():
    import coremltools as ct
real = ct.convert
def slow(*arguments, **options):
    try:
        reached()
    except:
        pass
    return real(*arguments, **options)
ct.convert = slow
"""),
        slow(after("upcycle.export.bundle", "sync_tree")),
    ],
)
def test_an_export(source: Path, tmp_path: Path, moment: str) -> None:
    output = tmp_path / "m.mlpackage"
    line = check(tmp_path, moment, "export", source, output, "--context", 32)
    assert line == f"stopped by SIGTERM; {NOTHING}\n"


@pytest.mark.parametrize(
    "command",
    [
        "inspect",
        "plan",
        *(slow(name) for name in ("predict", "verify", "doctor", "capacity")),
    ],
)
def test_commands_that_write_nothing(source: Path, tmp_path: Path, command: str) -> None:
    """Stopped in an import or while reading."""
    places = {
        "inspect": "import upcycle.kvcache.inspection as m\nm.inspect_checkpoint = reached",
        "plan": "import upcycle.planning as m\nm.plan = reached",
        "predict": after("upcycle.models.loading", "class_config"),
        "verify": "import upcycle.conversion.verify as m\nm.verify = reached",
        "doctor": "import upcycle.pipeline.preflight as m\nm._versions = reached",
        "capacity": "import upcycle.cli.app as m\nm.import_module = reached",
    }
    arguments = {
        "plan": (source, "--kv-heads", 2),
        "predict": (source, "--calibration", "builtin", "--calibration-tokens", 512),
        "verify": (source, source),
        "doctor": (),
        "capacity": (source, "--gpu-memory", "1GiB"),
    }
    setup = places[command]
    line = check(tmp_path, setup, command, *arguments.get(command, (source,)))
    assert line == f"stopped by SIGTERM; {NOTHING}\n"


def test_a_signal_after_the_work_changes_nothing(source: Path, tmp_path: Path) -> None:
    """Libraries take seconds to take themselves down."""
    setup = "import atexit\natexit.register(lambda: reached(seconds=1))"
    done = stops.stop(
        tmp_path, setup, "convert", source, tmp_path / "out", "--kv-heads", 2, number=signal.SIGINT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_conversion_in_a_thread_of_somebody_elses_program(source: Path, tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            convert(source, tmp_path / "out", kv_heads=2)
        except BaseException as error:  # noqa: BLE001 - to be raised by the test
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert (tmp_path / "out" / "config.json").is_file()
