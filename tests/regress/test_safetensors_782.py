"""safetensors/safetensors#782: weights written with mode 0600 whatever the umask says."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import upcycle.cli.eval
import upcycle.cli.sweep  # noqa: F401 - registers the commands
from tests.tiny import convert, tiny_checkpoint
from tests.training.runs import tiny_run
from upcycle.checkpoint.staging import scratch_folder, staged, write_file
from upcycle.cli.app import app
from upcycle.conversion.layer_store import LayerStore


@pytest.fixture(params=[0o022, 0o027], ids=["umask 022", "umask 027"])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def check(folder: Path, mask: int) -> None:
    """Everything at and below a path has the modes that the umask asks for."""
    wrong = {
        str(path): oct(path.stat().st_mode & 0o777)
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~mask
    }
    assert not wrong


def test_a_conversion(tmp_path: Path, mask: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    for path in source.iterdir():
        path.chmod(0o600)
    convert(source, tmp_path / "out", kv_heads=2)
    check(tmp_path / "out", mask)


def test_training_states_logs_and_results(tmp_path: Path, mask: int) -> None:
    result = tiny_run(tmp_path).train(steps=2)
    check(tmp_path / "out-training", mask)
    check(result.output, mask)


def test_reports_and_pages(tmp_path: Path, mask: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    common = ["--max-tokens", "60", "--sequence-length", "32"]
    report, page = tmp_path / "report", tmp_path / "page.html"
    for words in (
        ["eval", str(source), str(source), "--out", str(report)],
        ["sweep", str(source), "--kv-heads", "8", "--html", str(page)],
    ):
        done = CliRunner().invoke(app, [*words, *common])
        assert done.exit_code == 0, done.output
    check(report, mask)
    check(page, mask)


def test_an_export(tmp_path: Path, mask: int) -> None:
    from upcycle.export.coreml import export_coreml
    from upcycle.options.export import ExportOptions

    source = tiny_checkpoint(tmp_path / "source")
    export_coreml(source, tmp_path / "m.mlpackage", ExportOptions(context=32))
    check(tmp_path / "m.mlpackage", mask)
    check(tmp_path / "m-tokenizer", mask)


def test_what_a_stopped_calibration_left(tmp_path: Path, mask: int) -> None:
    """Another user of the group may go on with it."""
    work = tmp_path / "work"
    work.mkdir()
    store = LayerStore(work, {})
    store.save(0, {"k": torch.zeros(2)}, {})
    store.save_state(1, {"hidden": torch.zeros(2)})
    assert len(list(work.rglob("*.safetensors"))) == 2
    check(work, mask)


def test_links_lead_to_files_of_somebody_else(tmp_path: Path, mask: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.touch(mode=0o600)
    with staged(tmp_path / "made") as folder:
        (folder / "link").symlink_to(theirs)
    assert theirs.stat().st_mode & 0o777 == 0o600


def test_small_files(tmp_path: Path, mask: int) -> None:
    write_file(tmp_path / "a" / "b.json", "{}")
    check(tmp_path / "a", mask)


def test_temporary_folders_stay_private(tmp_path: Path, mask: int) -> None:
    del mask
    with scratch_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
