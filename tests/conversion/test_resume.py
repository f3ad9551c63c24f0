"""`--resume`: finished files are taken over only if they and their sources are what they were."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families.retarget_sources import source_checkpoint
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion import shards
from upcycle.conversion.convert import ConversionResult
from upcycle.conversion.journal import JOURNAL_NAME
from upcycle.errors import CheckpointError, OutputError
from upcycle.progress import Progress

OPTIONS: dict[str, Any] = {"kv_heads": 2, "seed": 1, "method": "random"}


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is certain which files are finished when a run stops."""
    monkeypatch.setattr(shards, "WORKERS", 1)


def stop_at(fraction: float) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.done >= fraction * progress.total:
            raise KeyboardInterrupt

    return watch


def interrupted(source: Path, output: Path, fraction: float = 0.6, **options: Any) -> Path:
    """What a run that stopped leaves."""
    with pytest.raises(KeyboardInterrupt):
        convert(source, output, resume=True, watch=stop_at(fraction), **{**OPTIONS, **options})
    assert not output.exists()
    return output.parent / f".{output.name}.partial"


def assert_same_bytes(found: Path, expected: Path) -> None:
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def resumed(source: Path, output: Path, **options: Any) -> ConversionResult:
    """Go on, and compare with an uninterrupted run."""
    result = convert(source, output, resume=True, **{**OPTIONS, **options})
    fresh = output.parent / "fresh"
    convert(source, fresh, overwrite=True, **{**OPTIONS, **options})
    assert_same_bytes(output, fresh)
    assert not (output.parent / f".{output.name}.partial").exists()
    return result


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("limit", [None, 100_000])
def test_a_resumed_run_gives_the_same_bytes(
    tmp_path: Path, fraction: float, limit: int | None
) -> None:
    shard_size = "100KB" if limit is None else "5GB"
    source = tiny_checkpoint(tmp_path / "source", max_shard_size=shard_size)
    left = interrupted(source, tmp_path / "out", fraction, max_shard_size=limit)
    finished = len((left / JOURNAL_NAME).read_text().splitlines()) - 1
    result = resumed(source, tmp_path / "out", max_shard_size=limit)
    assert result.resumed_shards == finished
    assert (finished > 0) == (fraction > 0.2)


def test_progress_starts_with_what_is_done(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    interrupted(source, tmp_path / "out", 0.99)
    seen: list[Progress] = []
    convert(source, tmp_path / "out", resume=True, watch=seen.append, **OPTIONS)
    first = Checkpoint.open(tmp_path / "out").headers[0]
    done = [progress.done for progress in seen]
    assert done[0] == sum(tensor.nbytes for tensor in first.tensors)
    assert done == sorted(done)
    assert done[-1] == seen[-1].total


def test_without_resume_it_starts_anew_and_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    interrupted(source, tmp_path / "out")
    assert convert(source, tmp_path / "out", **OPTIONS).resumed_shards == 0
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "other", watch=stop_at(0.6), **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_resume_without_leftovers_is_a_plain_run(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    assert resumed(source, tmp_path / "out").resumed_shards == 0


def flip(path: Path) -> None:
    """Change the last byte, and keep size and times."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_finished_file_that_changed_is_made_again(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    left = interrupted(source, tmp_path / "out", 0.99)
    names = [json.loads(line)["name"] for line in (left / JOURNAL_NAME).open().readlines()[1:]]
    flip(left / names[0])
    (left / names[1]).unlink()
    result = resumed(source, tmp_path / "out")
    assert result.resumed_shards == len(names) - 2


def test_a_file_whose_source_changed_is_made_again(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    left = interrupted(source, tmp_path / "out", 0.99)
    finished = len((left / JOURNAL_NAME).read_text().splitlines()) - 1
    changed = Checkpoint.open(source).headers[0].path
    flip(changed)
    result = resumed(source, tmp_path / "out")
    assert 0 < result.resumed_shards < finished


def test_a_layer_in_two_files_depends_on_both(tmp_path: Path) -> None:
    """The file that has only q of a layer is made again when the one with its k changes."""
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="40KB")
    shards_of = {n: t.shard for n, t in Checkpoint.open(source).tensors.items()}
    attention = "model.layers.0.self_attn."
    names = {shards_of[f"{attention}{p}_proj.weight"] for p in "qkvo"}
    assert len(names) > 1
    left = interrupted(source, tmp_path / "out", 0.99)
    records = [json.loads(line) for line in (left / JOURNAL_NAME).open().readlines()[1:]]
    for record in records:
        if record["name"] in names:
            assert set(record["sources"]) >= names


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_heads": 4}, "option kv_heads"),
        ({"method": "first"}, "option method"),
        ({"seed": 2}, "option seed"),
        ({"max_shard_size": 10**6}, "option max_shard_size"),
        ({"allow_nonfinite": True}, "option allow_nonfinite"),
    ],
)
def test_other_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    left = interrupted(source, tmp_path / "out")
    before = hash_folder(left), (left / JOURNAL_NAME).read_text()
    with pytest.raises(OutputError) as caught:
        convert(source, tmp_path / "out", resume=True, **{**OPTIONS, **options})
    assert part in caught.value.what
    assert "without --resume" in caught.value.fix
    assert before == (hash_folder(left), (left / JOURNAL_NAME).read_text())
    resumed(source, tmp_path / "out")


def test_another_source_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    interrupted(source, tmp_path / "out")
    config = source / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(OutputError, match=r"config\.json"):
        convert(source, tmp_path / "out", resume=True, **OPTIONS)
    other = tiny_checkpoint(tmp_path / "other", max_shard_size="100KB", intermediate_size=128)
    with pytest.raises(OutputError, match=r"header of model-00002-of.* and \d more"):
        convert(other, tmp_path / "out", resume=True, **OPTIONS)


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    interrupted(source, tmp_path / "out")
    monkeypatch.setattr("upcycle.checkpoint.manifest.__version__", "99")
    with pytest.raises(OutputError, match="version of upcycle"):
        convert(source, tmp_path / "out", resume=True, **OPTIONS)


@pytest.mark.parametrize(
    "damage",
    ["torn", "zeros", "no header", "empty", "gone", "not UTF-8", "no record", "other record"],
)
def test_a_damaged_journal_loses_only_what_it_cannot_say(tmp_path: Path, damage: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    left = interrupted(source, tmp_path / "out", 0.99)
    journal = left / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    finished = len(lines) - 1
    strange = {"not UTF-8": b'"\xff"\n', "no record": b"5\n", "other record": b'{"x": 1}\n'}
    expected = {"torn": finished - 1, "zeros": finished, "other record": finished}.get(damage, 0)
    if damage == "torn":
        journal.write_bytes(b"".join(lines)[:-9])
    elif damage == "zeros":
        journal.write_bytes(b"".join(lines) + bytes(100) + b"\n")
    elif damage in strange:
        journal.write_bytes(b"".join([lines[0], strange[damage], *lines[1:]]))
    elif damage == "no header":
        journal.write_bytes(lines[0][:10])
    elif damage == "empty":
        journal.write_bytes(b"")
    else:
        journal.unlink()
    assert resumed(source, tmp_path / "out").resumed_shards == expected


def test_strangers_in_the_hidden_folder_are_not_published(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    left = interrupted(source, tmp_path / "out")
    (left / "stale").mkdir()
    (left / "stale" / "file").write_text("stale")
    (left / "model.safetensors.index.json").write_text("{}")
    resumed(source, tmp_path / "out")


def test_a_damaged_source_keeps_what_is_finished(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    last = Checkpoint.open(source).headers[-1].path
    whole = last.read_bytes()
    left = tmp_path / ".out.partial"

    def shorten(progress: Progress) -> None:
        last.write_bytes(whole[:-1000])

    with pytest.raises(CheckpointError, match="shorter"):
        convert(source, tmp_path / "out", resume=True, watch=shorten, **OPTIONS)
    assert (left / JOURNAL_NAME).exists()
    last.write_bytes(whole)
    assert resumed(source, tmp_path / "out").resumed_shards > 0


def test_a_model_that_changes_its_class_is_resumed_too(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "pythia", max_shard_size="60KB")
    interrupted(source, tmp_path / "out", 0.9)
    assert resumed(source, tmp_path / "out").resumed_shards > 0
