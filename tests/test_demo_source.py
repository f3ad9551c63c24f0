"""The embedded default: what it is, and what it was not trained on."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.tiny import convert
from upcycle.checkpoint.manifest import hash_folder
from upcycle.data.documents import packaged_text

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "recipes" / "demo-source"
CORPUS = ROOT / "recipes" / "demo-text"


def cache_bytes(folder: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(40)[None], cache=cache, use_cache=True)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_eight_kv_heads_are_the_source_bit_by_bit(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "out", kv_heads=8)
    assert hash_folder(tmp_path / "out") == hash_folder(SOURCE)


def test_two_kv_heads_load_with_a_quarter_of_the_cache_and_the_same_bytes_twice(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        convert(SOURCE, tmp_path / name, kv_heads=2)
    assert cache_bytes(tmp_path / "a") * 4 == cache_bytes(SOURCE)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_the_three_texts_are_disjoint_and_those_of_the_list() -> None:
    listed = json.loads((CORPUS / "corpus.json").read_text())["files"]
    splits: dict[str, set[str]] = {}
    for row in listed:
        splits.setdefault(row["split"], set()).add(f"Lib/{row['path']}")
    train = pq.read_table(CORPUS / "train.parquet")
    assert set(train["source"].to_pylist()) == splits["train"]
    trained_on = set(train["text"].to_pylist())
    for name, split in (("heldout", "held-out"), ("calibration", "calibration")):
        rows = [json.loads(line) for line in packaged_text(name).read_text().splitlines()]
        assert {row["source"] for row in rows} == splits[split]
        assert not trained_on & {row["text"] for row in rows}
    sizes = [packaged_text(name).stat().st_size for name in ("heldout", "calibration")]
    assert sum(sizes) <= 1_000_000


def test_the_curve_ends_flat_and_low() -> None:
    rows = [json.loads(line) for line in (CORPUS / "curve.jsonl").read_text().splitlines()]
    last = rows[-1]
    before = next(row for row in rows if row["step"] >= 0.9 * last["step"])
    assert last["bits_per_byte"] < 1.5
    assert before["bits_per_byte"] - last["bits_per_byte"] < 0.02
