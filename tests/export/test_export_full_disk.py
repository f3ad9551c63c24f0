"""A disk without room: an error of three lines, and nothing is left."""

import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.errors import OutputError
from upcycle.export import saving
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions

OPTIONS = ExportOptions(context=64)
WRITER = "[MIL FileWriter]: Unknown error occurred while writing data to the file."
COPY = "filesystem error: cannot copy: No space left on device [a.mlmodel] [b.mlmodel]"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def system_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path_factory.mktemp("system")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What `ulimit -f` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_temporary_files_lie_beside_the_package_and_go(source: Path, system_folder: Path) -> None:
    output = source.parent / "model.mlpackage"
    export_coreml(source, output, ExportOptions(context=64, prefill=16))
    assert names(source.parent) == ["model-tokenizer", "model.mlpackage", "source"]
    assert names(system_folder) == []
    assert tempfile.tempdir == str(system_folder)
    export_coreml(source, output, OPTIONS, overwrite=True)  # it is known as ours


@pytest.mark.parametrize("options", [OPTIONS, ExportOptions(context=64, chunk_size=10**6)])
def test_weights_that_cannot_be_written(
    source: Path, options: ExportOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off
    output = source.parent / ("model.mlpackage" if options.chunk_size is None else "model")
    with (
        files_of_at_most(1 << 14),
        pytest.raises(OutputError, match=rf"cannot write .*{output.name}: Input/output") as caught,
    ):
        export_coreml(source, output, options)
    assert len(str(caught.value).splitlines()) == 3
    assert names(source.parent) == ["source"]


@pytest.mark.parametrize("message", [WRITER, COPY])
def test_a_full_disk_is_named(source: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(message)

    usage = shutil.disk_usage(source)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(saving, "convert_decoder", refuse)
    with pytest.raises(OutputError, match=r"model\.mlpackage: No space left on device"):
        export_coreml(source, source.parent / "model.mlpackage", OPTIONS)
    assert names(source.parent) == ["source"]


def test_other_errors_of_coremltools_stay_ours(
    source: Path, system_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug that writes nothing")

    monkeypatch.setattr(saving, "convert_decoder", fail)
    with pytest.raises(RuntimeError, match="a bug that"):
        export_coreml(source, source.parent / "model.mlpackage", OPTIONS)
    assert names(source.parent) == ["source"]
    assert tempfile.tempdir == str(system_folder)
