"""Output appears whole or not at all."""

import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from upcycle.checkpoint import staging
from upcycle.checkpoint.manifest import Manifest
from upcycle.checkpoint.staging import check_output, check_room, staged, staged_entry, write_file
from upcycle.errors import OutputError


def hidden_entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def sign(folder: Path) -> None:
    Manifest.of(stage="convert", source={}, options={}, libraries=(), result={}).write(folder)


def test_nothing_bears_the_name_until_the_block_ends(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with staged(output) as folder:
        (folder / "a").write_text("a")
        assert not output.exists()
    assert (output / "a").read_text() == "a"
    assert hidden_entries(tmp_path) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def fail_half_way() -> None:
        with staged(output) as folder:
            (folder / "a").write_text("a")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_not_taken_over(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    (left / "folder").mkdir(parents=True)
    (left / "stale").write_text("stale")
    with staged(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_an_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").write_text("old")
    with pytest.raises(OutputError, match="exists"), staged(output):
        pass
    assert (output / "old").read_text() == "old"


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").write_text("old")
    sign(output)
    with staged(output, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert (output / "old").exists(), "the old folder stays whole until the new one is"
    assert [path.name for path in output.iterdir()] == ["new"]
    assert hidden_entries(tmp_path) == []


@pytest.mark.parametrize("inside", [".", "sub", "sub/deeper"])
def test_an_output_inside_its_source_is_refused(tmp_path: Path, inside: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (
        pytest.raises(OutputError, match="inside the input"),
        staged(source / inside, inputs=[source], overwrite=True),
    ):
        pass
    assert list(source.iterdir()) == []


def test_two_writers_of_one_output_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with staged(output) as folder:
        (folder / "first").write_text("first")
        with pytest.raises(OutputError, match="another process"), staged(output):
            pass
        assert (folder / "first").exists()
    assert (output / "first").exists()


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with staged(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o640


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"), staged(tmp_path / "file" / "out"):
        pass


def test_one_package_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "model.mlpackage"
    with staged_entry(output) as path:
        path.mkdir()
        (path / "a").write_text("a")
        assert not output.exists()
    assert (output / "a").read_text() == "a"
    assert hidden_entries(tmp_path) == []


@pytest.mark.parametrize("output", ["outer", "outer/source", "outer/source/deep"])
def test_overwrite_never_touches_an_input(tmp_path: Path, output: str) -> None:
    source = tmp_path / "outer" / "source"
    source.mkdir(parents=True)
    (source / "weights").write_text("weights")
    sign(tmp_path / "outer")
    with (
        pytest.raises(OutputError, match="the input"),
        staged(tmp_path / output, inputs=[source], overwrite=True),
    ):
        pass
    assert (source / "weights").read_text() == "weights"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_overwrite_would_refuse_is_not_advised(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "precious.txt").write_text("precious")
    with pytest.raises(OutputError, match="not made by upcycle") as caught:
        check_output(tmp_path, overwrite=overwrite)
    assert "--overwrite" not in caught.value.fix
    sign(tmp_path)
    with pytest.raises(OutputError, match="exists") as caught:
        check_output(tmp_path)
    assert "--overwrite" in caught.value.fix


@pytest.mark.parametrize("package", ["m.mlpackage", "m.aimodel"])
@pytest.mark.parametrize("inside", ["inner.mlpackage", "Data/deep/out"])
def test_an_output_inside_a_package_is_refused(tmp_path: Path, package: str, inside: str) -> None:
    check_output(tmp_path / package / inside)
    (tmp_path / package).mkdir()
    with pytest.raises(OutputError, match=f"lies inside the package {package}"):
        check_output(tmp_path / package / inside, overwrite=True)
    (tmp_path / "link").symlink_to(package)
    with pytest.raises(OutputError, match="lies inside the package"):
        check_output(tmp_path / "link" / inside)


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_overwrite_replaces_nothing_that_was_not_made_here(tmp_path: Path, kind: str) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("thesis")
    if kind == "folder":
        elsewhere.rename(output)
    elif kind == "file":
        output.write_text("thesis")
    else:
        output.symlink_to(elsewhere)
    with (
        pytest.raises(OutputError, match="not made by upcycle"),
        staged(output, overwrite=True),
    ):
        pass
    kept = output if kind == "file" else output / "thesis.tex"
    assert kept.read_text() == "thesis"


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def write() -> None:
        with staged(output) as folder:
            (folder / "a").write_text("a")
            output.mkdir()
            (output / "mine").write_text("mine")

    with pytest.raises(OutputError, match="exists"):
        write()
    assert [path.name for path in output.iterdir()] == ["mine"]
    assert hidden_entries(tmp_path) == []


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "v").write_text("v")
    (tmp_path / ".out.partial").symlink_to(victim)
    with pytest.raises(OutputError, match="in the way"), staged(tmp_path / "out"):
        pass
    assert (victim / "v").read_text() == "v"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_an_output_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(OutputError, match="cannot be an output"), staged(Path(name)):
        pass


def test_a_full_disk_is_an_error_of_three_lines_and_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with staged(tmp_path / "out") as folder:
            raise OSError(errno.ENOSPC, "full", str(folder / "a"))

    with pytest.raises(OutputError, match="No space left on device") as caught:
        write()
    assert len(str(caught.value).splitlines()) == 3
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_folder_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with staged(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
    partial = tmp_path / ".out.partial"
    assert set(synced) == {
        str(partial),
        str(partial / "sub"),
        str(partial / "sub" / "a"),
        str(tmp_path),
    }


def test_a_package_made_by_others_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with staged_entry(tmp_path / "a.mlpackage") as path:
            path.mkdir(mode=0o700)
            (path / "weights").write_text("w")
            (path / "weights").chmod(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "a.mlpackage").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "a.mlpackage" / "weights").stat().st_mode & 0o777 == 0o644


def copy_onto_a_full_disk(folder: Path) -> None:
    def copy_function(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    source = folder / "source"
    source.mkdir()
    (source / "weights").write_text("w")
    with staged(folder / "out") as partial:
        shutil.copytree(source, partial / "copy", copy_function=copy_function)


def test_a_full_disk_is_known_from_a_copied_tree(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*out: No space left on device") as caught:
        copy_onto_a_full_disk(tmp_path)
    assert isinstance(caught.value.__cause__, shutil.Error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def write_beyond_a_limit(folder: Path, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with staged(folder / "out") as partial:
            save_file({"weight": np.zeros(1000)}, partial / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refusal_is_known_from_safetensors(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*out: File too large") as caught:
        write_beyond_a_limit(tmp_path, 1000)
    assert isinstance(caught.value.__cause__, SafetensorError)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_safetensors_file_is_no_refusal(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError), staged(tmp_path / "out"):
        load(b"no header")


def test_an_error_that_names_no_refusal_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(shutil.Error, match="exists"), staged(tmp_path / "out"):
        raise shutil.Error("the target exists")


def test_room_is_compared_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", {tmp_path: usage}.__getitem__)
    check_room(tmp_path, 100)
    with pytest.raises(OSError, match="less than 101 bytes") as caught:
        check_room(tmp_path, 101)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_is_written_into_missing_folders_and_over_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "page.html"
    for text in ("first, and longer", "zweite Fassung: é"):
        write_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [path.name for path in path.parent.iterdir()] == ["page.html"]


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(staging, "sync", refuse)
    with pytest.raises(OutputError, match=r"cannot write .*page\.html: No space left"):
        write_file(path, "newer")
    assert path.read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    for text in ("first", "second"):
        write_file(link, text)
        assert link.is_symlink()
        assert (tmp_path / "file").read_text() == text


def test_what_is_no_plain_file_is_written_to() -> None:
    reading, writing = os.pipe()
    try:
        write_file(Path(f"/dev/fd/{writing}"), "page")  # as /dev/stdout often is
        assert os.read(reading, 10) == b"page"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_file(tmp_path, "page")
