"""Text that the source of a conversion writes itself: chats, pages, mixtures, refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import byte_tokenizer, convert, tiny_checkpoint, tiny_model
from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion import own_text
from upcycle.conversion.convert import check_request
from upcycle.conversion.predict import predict
from upcycle.errors import DataError, DeviceError, OutputError, PlanError, UpcycleWarning
from upcycle.kvcache.sampling import sampling_bytes
from upcycle.models import sampling
from upcycle.models.calibration_text import calibration_rows, row_counts
from upcycle.models.sampling import is_loop
from upcycle.options.convert import ConvertOptions, MergeOptions
from upcycle.pipeline.sweep import sweep_kv_heads

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_checkpoint(folder: Path, **overrides: Any) -> Path:
    """A tiny model whose tokenizer has a chat template with special tokens of its own."""
    tiny_checkpoint(folder, max_position_embeddings=1024, **overrides)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return chat_checkpoint(tmp_path / "source")


SMALL: dict[str, Any] = {"kv_heads": 2, "calibration_tokens": 2048, "calibration_window": 256}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_source_with_a_template_writes_chats(source: Path, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "out", calibration=["self"], **SMALL)
    path = tmp_path / "out.calibration.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    turns = [[message["role"] for message in row["messages"]] for row in rows]
    assert all(each in (["user", "assistant"], ["user", "assistant"] * 2) for each in turns)
    assert ["user", "assistant"] * 2 in turns
    assert all(message["content"] for row in rows for message in row["messages"])
    own = made.manifest.document["result"]["own_text"]
    assert own["hash"] == hash_file(path)
    assert (own["file"], own["kept"], own["chats"]) == (path.name, len(rows), True)
    assert own["tokens"] >= 2048
    assert own["temperature"] == sampling.TEMPERATURE
    assert made.manifest.document["options"]["calibration"] == ["self"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name[:3], path.name, "source"]
    assert not [each.name for each in (tmp_path / "out").iterdir() if each.name[0] == "."]


def test_the_file_gives_another_machine_the_same_weights(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", calibration=["self"], **SMALL)
    convert(source, tmp_path / "b", calibration=[tmp_path / "a.calibration.jsonl"], **SMALL)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    convert(source, tmp_path / "c", calibration=["self", "builtin"], **SMALL)
    texts = [tmp_path / "c.calibration.jsonl", "builtin"]
    convert(source, tmp_path / "d", calibration=texts, calibration_weights=(1, 1), **SMALL)
    assert weights(tmp_path / "c") == weights(tmp_path / "d")


def test_the_seed_decides_what_is_written(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(source, tmp_path / name, calibration=["self"], seed=seed, **SMALL)
    texts = [(tmp_path / f"{name}.calibration.jsonl").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_a_killed_conversion_goes_on_with_the_same_text(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", calibration=["self"], **SMALL)

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("upcycle.conversion.convert.merge_layers", kill)
        with pytest.raises(Killed):
            convert(source, tmp_path / "out", calibration=["self"], resume=True, **SMALL)
    assert not (tmp_path / "out.calibration.jsonl").exists()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the text was written again")

    monkeypatch.setattr(sampling, "write_own_text", never)
    convert(source, tmp_path / "out", calibration=["self"], resume=True, **SMALL)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    texts = [(tmp_path / f"{name}.calibration.jsonl").read_bytes() for name in ("out", "whole")]
    assert texts[0] == texts[1]


def test_a_source_without_a_template_writes_pages(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", max_position_embeddings=1024)
    made = convert(source, tmp_path / "out", calibration=["self"], **SMALL)
    rows = (tmp_path / "out.calibration.jsonl").read_text().splitlines()
    assert all(list(json.loads(row)) == ["text"] for row in rows)
    own = made.manifest.document["result"]["own_text"]
    assert not own["chats"]
    assert "pages from BOS alone, as there is no chat template" in own["summary"]


def test_each_text_gives_its_share(source: Path, tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(letter * 20_000)
    rows = calibration_rows(
        Checkpoint.open(source),
        [tmp_path / "a.txt", tmp_path / "b.txt"],
        tokens=1600,
        sequence_length=100,
        weights=(3, 1),
    )
    ids = [byte_tokenizer().convert_tokens_to_ids(letter) for letter in "ab"]
    counts = [sum(int((row == token).sum() > 50) for row in rows) for token in ids]
    assert counts == [12, 4]
    of_b = [index for index, row in enumerate(rows) if (row == ids[1]).sum() > 50]
    assert of_b != [12, 13, 14, 15]  # mixed, for the first rows are held out


@given(
    rows=st.integers(1, 2000),
    shares=st.lists(st.floats(0.01, 5), min_size=1, max_size=6),
)
def test_counts_are_whole_and_fair(rows: int, shares: list[float]) -> None:
    counts = row_counts(rows, shares)
    assert min(counts) >= 1
    if rows >= 100 * len(shares):
        assert sum(counts) == rows or min(counts) == 1
    total = sum(shares)
    assert all(
        abs(count - rows * share / total) <= 1 or count == 1
        for count, share in zip(counts, shares, strict=True)
    )


def test_a_mixture_without_weights_is_even(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("plain words " * 2000)
    options = MergeOptions(calibration=("self", text))
    assert options.shares == (1.0, 1.0)
    assert MergeOptions(calibration=("self",)).shares == ()
    assert MergeOptions(calibration=(text, text)).shares == ()
    made = convert(source, tmp_path / "out", calibration=["self", text], **SMALL)
    assert 1024 <= made.manifest.document["result"]["own_text"]["tokens"] < 2048


def test_what_is_not_seen_is_told(source: Path, tmp_path: Path) -> None:
    with pytest.warns(UpcycleWarning, match=r"no chat: none of <\|user\|>, <\|assistant\|>"):
        convert(source, tmp_path / "a", calibration=["builtin"], **SMALL)
    convert(source, tmp_path / "b", calibration=["builtin", "self"], **SMALL)  # warnings are errors


def test_predict_and_sweep_read_it_and_leave_nothing(source: Path, tmp_path: Path) -> None:
    merging = MergeOptions(calibration=("self",), calibration_tokens=1024, calibration_window=128)
    assert predict(source, merging).tokens == 1024
    text = tmp_path / "t.txt"
    text.write_text("some words to compare on " * 20)
    from upcycle.options.evaluate import EvaluateOptions

    reading = EvaluateOptions(text=(text,), max_tokens=64, sequence_length=64, device="cpu")
    swept = sweep_kv_heads(source, merging, reading, kv_heads=[4, 2])
    assert [choice.counts.kv_heads for choice in swept.choices] == [4, 2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["source", "t.txt"]


def test_a_model_that_does_not_fit_is_refused_before_anything(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sampling_bytes(Checkpoint.open(source))
    embedding = 260 * 12 * 16
    cache = 2 * 2 * 8 * 8 * 1024 * 16 * 4  # layers, K and V, heads, head_dim
    assert needed == Checkpoint.open(source).weight_bytes + cache + embedding
    monkeypatch.setattr(own_text, "free_memory", lambda _: needed - 1)
    options = ConvertOptions(calibration=("self",), **SMALL)
    with pytest.raises(DeviceError, match=r"the whole model is held: 0\.\d\d GiB, and 0\.\d\d GiB"):
        check_request(source, options)
    with pytest.raises(DeviceError, match="are free"):
        convert(source, tmp_path / "out", calibration=["self"], **SMALL)
    assert os.listdir(tmp_path) == ["source"]
    monkeypatch.setattr(own_text, "free_memory", lambda _: needed)
    check_request(source, options)


def test_a_text_that_is_there_stays(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.calibration.jsonl"
    path.write_text("mine")
    with pytest.raises(OutputError, match=r"out\.calibration\.jsonl exists"):
        convert(source, tmp_path / "out", calibration=["self"], **SMALL)
    assert path.read_text() == "mine"
    convert(source, tmp_path / "out", calibration=["self"], overwrite=True, **SMALL)
    assert path.read_text().startswith('{"messages"')


def test_a_file_of_that_name_is_read(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("self", "builtin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("words of mine " * 800)
        options = MergeOptions(calibration=(f"./{name}",))
        assert options.calibration == (tmp_path / name,)
        assert not options.own_text
    with pytest.raises(DataError, match=r"writes itself; it cannot be read here"):
        calibration_rows(Checkpoint.open(source), ["self"], tokens=8, sequence_length=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": ("builtin",), "calibration_weights": (0.5, 0.5)}, "has 2 values"),
        ({"calibration": ("builtin",), "calibration_weights": (0.0,)}, "must be above 0"),
        ({"calibration": ("builtin",), "calibration_weights": "a,b"}, "no list of numbers"),
        ({"calibration": ("self", "self")}, "only once"),
        ({"calibration": ("self",), "calibration_window": 1}, "calibration-window"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        MergeOptions(**options)


def test_weights_as_a_command_line_has_them() -> None:
    options = MergeOptions(calibration=("self", "builtin"), calibration_weights="0.5, 0.25")
    assert options.shares == (0.5, 0.25)


def test_a_model_that_says_nothing_is_refused(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=1024, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
    model.save_pretrained(tmp_path / "source")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "source")
    # Every token is as likely: nothing is empty and nothing a loop.
    convert(tmp_path / "source", tmp_path / "out", calibration=["self"], method="lowrank", **SMALL)

    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight[0].fill_(10)  # the end, at once
    model.save_pretrained(tmp_path / "silent")
    tokenizer.save_pretrained(tmp_path / "silent")
    with pytest.raises(DataError, match=r"of 64 texts that the model wrote 64 are empty"):
        convert(tmp_path / "silent", tmp_path / "none", calibration=["self"], **SMALL)
    assert not (tmp_path / "none").exists()


def test_loops_are_told_from_text() -> None:
    assert is_loop([5] * 40)
    assert is_loop([1, 2, 3, 4, 5, 6, 7] * 8)
    assert not is_loop(list(range(60)))
    assert not is_loop([1, 2, 1, 2, 1])  # too short to be one


@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize(
    "setting", [("top_p", 0.05), ("top_k", 1), ("min_p", 0.9), ("repetition_penalty", 9.0)]
)
def test_what_the_checkpoint_says_of_sampling_counts_for_nothing(
    setting: tuple[str, float], temperature: float | None
) -> None:
    model, tokenizer = tiny_model(max_position_embeddings=64), byte_tokenizer()

    def written() -> list[list[int]]:
        torch.manual_seed(0)
        prompts = [[1, 2, 3], [4, 5]]
        return sampling.continued(model, tokenizer, prompts, 20, temperature=temperature)

    expected = written()
    setattr(model.generation_config, *setting)
    assert written() == expected
    assert getattr(model.generation_config, setting[0]) == setting[1]


def test_greedy_text_is_the_likeliest_and_ends_where_the_checkpoint_says() -> None:
    model, tokenizer = tiny_model(max_position_embeddings=64), byte_tokenizer()
    prompts, expected = [[1, 2, 3], [4, 5]], []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert sampling.continued(model, tokenizer, prompts, 12) == expected
    end = expected[0][5]
    model.generation_config.eos_token_id = [0, end]
    assert (
        sampling.continued(model, tokenizer, prompts[:1], 12)[0]
        == (expected[0][: expected[0].index(end) + 1])
    )
