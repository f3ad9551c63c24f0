"""`--max-shard-size`: other files, the same tensors."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint
from upcycle.checkpoint.writer import shard_name, split_by_size
from upcycle.cli.app import main
from upcycle.conversion.verify import verify
from upcycle.errors import PlanError
from upcycle.planning import plan


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_files_are_filled_in_order(sizes: list[int], limit: int) -> None:
    parts = [sizes[part] for part in split_by_size(sizes, limit)]
    assert [size for part in parts for size in part] == sizes
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert part
        assert sum(part) <= limit or len(part) == 1
        assert following is None or sum(part) + following[0] > limit


def test_names_are_those_of_transformers() -> None:
    assert shard_name(0, 1) == "model.safetensors"
    assert shard_name(1, 12) == "model-00002-of-00012.safetensors"


def tensors(folder: Path) -> dict[str, list[float]]:
    files = folder.glob("*.safetensors")
    return {k: v.flatten().tolist() for path in files for k, v in load_file(path).items()}


@pytest.mark.parametrize("model_type", ["llama", "stablelm"])
@pytest.mark.parametrize("source_shards", ["5GB", "100KB"])
@pytest.mark.parametrize("limit", [30_000, 150_000, 10**9])
def test_the_same_tensors_in_other_files(
    tmp_path: Path, model_type: str, source_shards: str, limit: int
) -> None:
    settings = {"qk_layernorm": True} if model_type == "stablelm" else {}
    source = tiny_checkpoint(
        tmp_path / "source", model_type, max_shard_size=source_shards, **settings
    )
    convert(source, tmp_path / "kept", kv_heads=2)
    convert(source, tmp_path / "out", kv_heads=2, max_shard_size=limit)
    out = Checkpoint.open(tmp_path / "out")
    sizes = [[tensor.nbytes for tensor in header.tensors] for header in out.headers]
    assert all(sum(file) <= limit or len(file) == 1 for file in sizes)
    count = len(sizes)
    assert [h.path.name for h in out.headers] == [shard_name(i, count) for i in range(count)]
    assert (out.folder / INDEX_FILE).exists() == (count > 1)
    assert (count == 1) == (limit == 10**9)
    if count > 1:
        index = json.loads((out.folder / INDEX_FILE).read_text())
        assert index["weight_map"] == {name: t.shard for name, t in out.tensors.items()}
        assert index["metadata"]["total_size"] == out.weight_bytes
    assert tensors(tmp_path / "out") == tensors(tmp_path / "kept")
    assert all(header.metadata == {"format": "pt"} for header in out.headers)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert verify(source, tmp_path / "out").passed


def test_the_source_s_files_are_kept_by_default(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_shard_size="100KB")
    names = {path.name for path in source.glob("*.safetensors*")}
    assert len(names) > 3
    convert(source, tmp_path / "out", kv_heads=2)
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors*")} == names


def test_an_index_of_one_file_is_kept(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    weight_map = dict.fromkeys(Checkpoint.open(source).tensors, SINGLE_FILE)
    (source / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(source, tmp_path / "out", kv_heads=2)
    assert (tmp_path / "out" / INDEX_FILE).exists()
    convert(source, tmp_path / "joined", kv_heads=2, max_shard_size=10**9)
    assert not (tmp_path / "joined" / INDEX_FILE).exists()


def test_a_plan_names_the_files(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    todo = plan(source, kv_heads=2, max_shard_size=100_000)
    convert(source, tmp_path / "out", kv_heads=2, max_shard_size=100_000)
    written = {
        h.path.name: [t.name for t in h.tensors] for h in Checkpoint.open(tmp_path / "out").headers
    }
    assert {s.name: [op.output.name for op in s.operations] for s in todo.shards} == written


@pytest.mark.parametrize("size", [0, -5])
def test_a_size_that_holds_nothing_is_refused(tmp_path: Path, size: int) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    with pytest.raises(PlanError, match="cannot hold"):
        convert(source, tmp_path / "out", kv_heads=2, max_shard_size=size)


@pytest.mark.parametrize("size", ["five", "5 apples", "-1GB", "", "0"])
@pytest.mark.parametrize("command", ["plan", "convert"])
def test_bad_sizes_exit_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: str,
    command: str,
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    outputs = [str(tmp_path / "out")] if command == "convert" else []
    arguments = [command, str(source), *outputs, "--kv-heads", "2", f"--max-shard-size={size}"]
    monkeypatch.setattr("sys.argv", ["upcycle", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert lines[1] == "  where: --max-shard-size"
    assert not (tmp_path / "out").exists()
