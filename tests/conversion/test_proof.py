"""What `convert` proves of every file that it writes, and what it does when something fails."""

import errno
import threading
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.writer import ShardWriter
from upcycle.conversion import merging, shards
from upcycle.errors import OutputError
from upcycle.heads.methods import METHODS, Method
from upcycle.planning import Attention, plan


def test_a_copy_that_differs_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    chunks = Checkpoint.chunks
    reads: list[str] = []

    def flip(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
        """The second read is the one that is written: the first hashes, the third proves."""
        reads.append(name)
        for chunk in chunks(checkpoint, name):
            broken = name == "model.norm.weight" and reads.count(name) == 2
            yield bytes([chunk[0] ^ 1]) + chunk[1:] if broken else chunk

    monkeypatch.setattr(Checkpoint, "chunks", flip)
    monkeypatch.setattr(shards, "WORKERS", 1)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_byte_that_changes_on_disk_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In a merged tensor too: the file must read back as it was written."""
    source = tiny_checkpoint(tmp_path / "source")
    merged = [op for op in plan(source, kv_heads=2).operations if isinstance(op, Attention)]
    victim = merged[0 if place == "first" else -1].output.name
    close = ShardWriter.close

    def damage(writer: ShardWriter) -> str:
        digest = close(writer)
        path = tmp_path / ".out.partial" / "model.safetensors"
        data = bytearray(path.read_bytes())
        tensor = next(t for t in shards_header(path) if t.name == victim)
        data[tensor.offset] ^= 1
        path.write_bytes(data)
        return digest

    monkeypatch.setattr(ShardWriter, "close", damage)
    with pytest.raises(AssertionError, match="reads back differently"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def shards_header(path: Path) -> Any:
    from upcycle.checkpoint.headers import read_header

    return read_header(path).tensors


def test_tensors_that_a_method_leaves_alone_are_not_held(tmp_path: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source", "qwen2", attention_bias=True))
    roles = {"k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}
    for method in (each for each in METHODS if each.only_kv):
        todo = plan(source, kv_heads=2, method=method.name)
        assert set(merging.LayerMerger(source, todo, allow_nonfinite=False).changed(0)) == roles


@pytest.mark.parametrize(
    "method", [e for e in METHODS if not e.needs_calibration], ids=attrgetter("name")
)
def test_queries_are_read_only_where_a_method_looks_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source"))
    chunks = Checkpoint.chunks
    read: set[str] = set()

    def note(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
        read.add(name.split(".")[4])
        return chunks(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "chunks", note)
    todo = plan(source, kv_heads=2, method=method.name)
    merging.LayerMerger(source, todo, allow_nonfinite=False).changed(0)
    unread = {"q_proj", "o_proj"} if method.only_kv else set()
    assert read == {"q_proj", "k_proj", "v_proj", "o_proj"} - unread


def test_a_method_that_changes_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    def doubled(weights: Any, request: Any) -> Any:
        merged = METHODS.get("mean").merge(weights, request)  # type: ignore[union-attr]
        return replace(merged, q=weights.q * 2, o=weights.o * 2)

    source = tiny_checkpoint(tmp_path / "source")
    monkeypatch.setitem(METHODS._values, "doubled", Method("doubled", doubled, "none"))
    convert(source, tmp_path / "out", kv_heads=2, method="doubled")
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")
    for role in ("q_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{role}.weight"
        assert torch.equal(after.read(name), before.read(name) * 2)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_what_the_disk_refuses_is_an_error_of_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, resume: bool
) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    written = 0
    monkeypatch.setattr(shards, "WORKERS", 1)
    write = ShardWriter._write

    def fill(writer: ShardWriter, data: bytes | memoryview) -> None:
        nonlocal written
        written += len(data)
        if written > 200_000:
            raise OSError(code, "no")
        write(writer, data)

    with monkeypatch.context() as full:
        full.setattr(ShardWriter, "_write", fill)
        with pytest.raises(OutputError) as caught:
            convert(source, tmp_path / "out", kv_heads=2, resume=resume)
    assert len(str(caught.value).splitlines()) == 3
    kept = [".out.partial"] if resume else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "source"]
    result = convert(source, tmp_path / "out", kv_heads=2, resume=resume)
    assert (result.resumed_shards > 0) == resume


def test_a_failure_leaves_no_thread_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="20KB")
    before = threading.active_count()

    def fail(*_: object) -> str:
        raise RuntimeError("planted")

    monkeypatch.setattr(shards, "prove_shard", fail)
    with pytest.raises(RuntimeError, match="planted"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert threading.active_count() == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", max_shard_size="20KB")
    for workers in (1, 2, 7):
        monkeypatch.setattr(shards, "WORKERS", workers)
        convert(source, tmp_path / str(workers), kv_heads=2, method="random", seed=3)
    for path in (tmp_path / "1").iterdir():
        for other in ("2", "7"):
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes(), path.name
