"""A model that changes its class keeps its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from tests.families.retarget_sources import source_checkpoint, view_of
from upcycle.checkpoint.sidecars import copy_sidecars
from upcycle.conversion.tokenizer import keep_tokenizer
from upcycle.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def retarget_sidecars(source: Path, output: Path) -> None:
    """What `convert` puts beside the weights."""
    output.mkdir()
    view = view_of(source)
    copy_sidecars(view, output)
    (output / "config.json").write_text(view.config_text)


def gpt2_files(folder: Path, settings: dict[str, Any]) -> None:
    """A tokenizer as GPT-2 and OPT checkpoints have it: without `tokenizer.json`."""
    letters = AutoTokenizer.from_pretrained(folder).get_vocab()
    vocabulary = {**letters, "he": 257, "Ġw": 258, "<pad>": 259}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nĠ w\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"model_max_length": 64}),
        ("opt", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"}),
    ],
)
def test_the_tokenizer_stays_the_same(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    source = source_checkpoint(tmp_path / "source", name)
    gpt2_files(source, settings)
    retarget_sidecars(source, tmp_path / "out")
    assert keep_tokenizer(source, tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(f) for f in (source, tmp_path / "out"))
    text = "hello  wörld<|endoftext|> 12\n"
    assert before(text).input_ids == after(text).input_ids
    assert len(before(text).input_ids) == 16 + (name == "opt")
    assert before.special_tokens_map == after.special_tokens_map
    files = {path.name: path.read_text() for path in (tmp_path / "out").glob("token*")}
    assert "tokenizer.json" in files
    assert str(tmp_path) not in "".join(files.values())
    assert not keep_tokenizer(source, tmp_path / "out")


def test_a_tokenizer_that_loads_alike_is_copied(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gpt2")
    retarget_sidecars(source, tmp_path / "out")
    assert not keep_tokenizer(source, tmp_path / "out")
    for name in TOKENIZER_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_model_without_a_tokenizer_gets_none(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gpt2")
    for name in TOKENIZER_FILES:
        (source / name).unlink()
    retarget_sidecars(source, tmp_path / "out")
    assert not keep_tokenizer(source, tmp_path / "out")


def test_a_tokenizer_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gpt2")
    for name in TOKENIZER_FILES:
        (source / name).unlink()
    ByT5Tokenizer().save_pretrained(source)
    retarget_sidecars(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="ByT5Tokenizer"):
        keep_tokenizer(source, tmp_path / "out")
