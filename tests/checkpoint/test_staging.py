"""Output appears whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from upcycle.checkpoint.staging import staged, staged_entry
from upcycle.errors import OutputError


def hidden_entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


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
    (output / "upcycle.json").write_text("{}")
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
    (tmp_path / "outer" / "upcycle.json").write_text("{}")
    with (
        pytest.raises(OutputError, match="the input"),
        staged(tmp_path / output, inputs=[source], overwrite=True),
    ):
        pass
    assert (source / "weights").read_text() == "weights"


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
    staging = tmp_path / ".out.partial"
    assert set(synced) == {
        str(staging),
        str(staging / "sub"),
        str(staging / "sub" / "a"),
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
