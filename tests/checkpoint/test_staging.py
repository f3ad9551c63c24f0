"""Output appears whole or not at all."""

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
        pytest.raises(OutputError, match="inside the source"),
        staged(source / inside, source=source, overwrite=True),
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
