"""Files that are no files, cannot be read, or have odd names: told at once, never waited for."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest

from tests.tiny import convert, tiny_checkpoint
from tests.training.runs import tiny_run
from upcycle.checkpoint.files import chunks_of, visible_files
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.sidecars import copy_sidecars
from upcycle.conversion.convert import check_request
from upcycle.conversion.shards import ShardWork
from upcycle.errors import CheckpointError
from upcycle.options.convert import ConvertOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "source")


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the name of a socket may have 107 bytes


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is not a regular file"),
    "socket": (listen, "cannot read"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "link to nothing": (lambda path: path.symlink_to("blob"), "a link to blob, which is gone"),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic"),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_refused(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = ODD_FILES[kind]
    (folder / name).unlink()
    monkeypatch.chdir(folder)
    make(folder / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_named(
    folder: Path, tmp_path: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, which may read everything."""
    real = os.open

    def refusing(path: os.PathLike[str], flags: int, *rest: int) -> int:
        if os.fspath(path) == str(folder / name):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(CheckpointError, match=f"cannot read {name}: {os.strerror(number)}"):
        copy_sidecars(Checkpoint.open(folder), tmp_path)


def test_sidecars_are_copied_and_other_weights_left_behind(folder: Path, tmp_path: Path) -> None:
    files = {
        "tokenizer.model": b"\x00\xff", "chat_template.jinja": b"{{ x }}\r\n", "LICENSE": b"",
        "modeling_custom.py": b"pass", "ünï code.txt": b"1", "nested/deep/readme": b"2",
    }  # fmt: skip
    left = ["extra.safetensors", "nested/model.onnx", "pytorch_model.bin.index.json"]
    (folder / "nested" / "deep").mkdir(parents=True)
    for name, data in {**files, **dict.fromkeys([*left, ".cache", "nested/.git"], b"x")}.items():
        (folder / name).write_bytes(data)
    (folder / "linked").symlink_to("tokenizer.model")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder)
    output = tmp_path / "output"
    output.mkdir()
    assert copy_sidecars(Checkpoint.open(folder), output) == left
    for name, data in {**files, "linked": b"\x00\xff"}.items():
        assert (output / name).read_bytes() == data
        assert not (output / name).is_symlink()
    copied = set(visible_files(output))
    assert copied == set(visible_files(folder)) - {*left, "config.json", "model.safetensors"}


def test_a_link_to_nothing_among_the_sidecars_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "merges.txt").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"merges\.txt is missing: a link to \.\./blobs/gone"):
        copy_sidecars(Checkpoint.open(folder), tmp_path)


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    with pytest.raises(CheckpointError, match="a file name is not UTF-8"):
        visible_files(tmp_path)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot list"):
        visible_files(tmp_path / "gone")


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (1 << 15))
    data = path.read_bytes()
    assert [len(chunk) for chunk in chunks_of(path)] == [1 << 18] * 32
    assert b"".join(chunks_of(path, 5)) == data[5:]
    assert b"".join(chunks_of(path, 5, 10)) == data[5:15]
    with pytest.raises(CheckpointError, match="became shorter"):
        list(chunks_of(path, 5, len(data)))


@pytest.mark.parametrize("kind", ["name", "link"])
def test_files_that_cannot_be_copied_are_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And not after it: a large model takes hours to convert or to train."""
    run = tiny_run(tmp_path)
    for folder in (run.teacher, run.student):
        if kind == "name":
            (folder / os.fsdecode(b"caf\xe9.json")).touch()
        else:
            (folder / "merges.txt").symlink_to("gone")
    monkeypatch.setattr(ShardWork, "run", lambda _: pytest.fail("weights were written"))
    monkeypatch.setattr(accelerate.Accelerator, "backward", lambda *_: pytest.fail("was trained"))
    reason = r"not UTF-8: 'caf\\xe9\.json'" if kind == "name" else "merges.txt is missing: a link"
    with pytest.raises(CheckpointError, match=reason):
        convert(run.teacher, tmp_path / "output", kv_heads=1)
    with pytest.raises(CheckpointError, match=reason):
        check_request(run.teacher, ConvertOptions(kv_heads=1))
    with pytest.raises(CheckpointError, match=reason):
        run.train(steps=1)
