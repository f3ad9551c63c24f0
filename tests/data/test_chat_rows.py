"""Rows with chats: every spelling, what reaches the template, and rows that it cannot take."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny import byte_tokenizer
from upcycle.data.documents import tokenise_files
from upcycle.data.ledger import Ledger
from upcycle.errors import DataError, UpcycleWarning

# Prints what it is given, refuses two messages of one role in a row.
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}"
    "{% if documents %}D{{ documents | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}E{{ enable_thinking }}{% endif %}"
    "{% if style is defined %}S{{ style }}{% endif %}"
    "{% set ns = namespace(last='') %}"
    "{% for m in messages %}"
    "{% if m['role'] == ns.last %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.last = m['role'] %}"
    "[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['tool_calls'] %}C{{ m['tool_calls'] | tojson }}{% endif %}"
    "{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
HI_TEXT = "[user]hi[assistant]ho"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}]
BAD = {"messages": [*HI, {"role": "assistant", "content": "again"}]}


def read(
    folder: Path, rows: list[Mapping[str, Any]], template: str = TEMPLATE, **options: Any
) -> tuple[list[str], Ledger]:
    """What is trained on of a JSONL file, as text, and the counts."""
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return texts_of(path, template, **options)


def texts_of(path: Path, template: str = TEMPLATE, **options: Any) -> tuple[list[str], Ledger]:
    tokenizer, ledger = byte_tokenizer(), Ledger()
    tokenizer.chat_template = template
    found = [
        tokenizer.decode(tokens.ids, skip_special_tokens=True)
        for tokens in tokenise_files([path], tokenizer, ledger=ledger, **options)
    ]
    return found, ledger


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": HI}, HI_TEXT),
        ({"messages": HI, "tools": TOOLS}, "T" + json.dumps(TOOLS) + HI_TEXT),
        ({"messages": HI, "tools": json.dumps(TOOLS)}, "T" + json.dumps(TOOLS) + HI_TEXT),
        ({"messages": HI, "tools": []}, HI_TEXT),
        ({"messages": HI, "documents": [{"t": "x"}]}, 'D[{"t": "x"}]' + HI_TEXT),
        ({"messages": HI, "enable_thinking": False}, "EFalse" + HI_TEXT),
        (
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": True, "style": "s"}},
            "ETrueSs" + HI_TEXT,
        ),
        ({"messages": [{**HI[0], "tool_calls": None}, HI[1]]}, HI_TEXT),
        (
            {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": [1]}]},
            "[user]hi[assistant]C[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, HI[1]]},
            HI_TEXT,
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            HI_TEXT,
        ),
        (
            {"system": "be", "conversations": [{"from": "human", "value": "hi"}]},
            "[system]be[user]hi",
        ),
        ({"conversations": HI}, HI_TEXT),
        ({"prompt": "one ", "completion": "two"}, "one two"),
        ({"prompt": HI[:1], "completion": HI[1:]}, HI_TEXT),
        ({"text": "plain", "messages": None}, "plain"),
        ({"text": "plain", "messages": "no chat"}, "plain"),
        ({"text": None, "messages": HI}, HI_TEXT),
    ],
)
def test_what_the_model_reads(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    found, ledger = read(tmp_path, [row])
    assert found == [text]
    assert not ledger.has_losses


def test_chats_in_parquet_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": HI, "tools": [{"name": "f", "a": 1}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": ["c"]}], "tools": [{"b": 2}]},
    ]
    expected = ['T[{"name": "f", "a": 1}]' + HI_TEXT, 'T[{"b": 2}][user]xC["c"]']
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert texts_of(tmp_path / "t.parquet")[0] == expected
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert texts_of(tmp_path / "saved")[0] == expected


def test_a_row_with_text_and_a_chat_is_a_chat_unless_the_column_is_named(tmp_path: Path) -> None:
    rows = [{"text": "plain", "messages": HI, "prompt": "a", "completion": "b"}] * 2
    found, ledger = read(tmp_path, rows)
    assert found == [HI_TEXT] * 2
    assert ledger.unused == {
        "unused 'text' beside 'messages'": 2,
        "unused 'prompt' beside 'messages'": 2,
    }
    assert "2 with unused 'text' beside 'messages'" in ledger.summary()
    found, ledger = read(tmp_path, rows, text_column="text")
    assert found == ["plain"] * 2
    assert ledger.unused["unused 'messages' beside 'text'"] == 2


def test_what_the_template_does_not_read_is_counted(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found, ledger = read(tmp_path, [{"messages": HI, "tools": TOOLS}], plain)
    assert found == ["hiho"]
    assert ledger.unused == {"unused 'tools', which the chat template does not read": 1}


def test_keys_of_messages_that_the_template_does_not_read_are_counted(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    rows = [{"messages": [HI[0], call]}, {"messages": HI, "functions": [{"name": "f"}]}]
    found, ledger = read(tmp_path, rows, plain)
    assert found == ["hi", "hiho"]
    assert ledger.unused == {
        "unused 'tool_calls', which the chat template does not read": 1,
        "unused 'functions', which the chat template does not read": 1,
    }


def test_plain_text_counts_what_is_for_chats(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "tools": TOOLS, "system": "s"},
        {"prompt": "a", "completion": "b", "enable_thinking": False},
        {"text": "a", "tools": [], "system": "", "chat_template_kwargs": {}},
    ]
    found, ledger = read(tmp_path, rows)
    assert found == ["a", "ab", "a"]
    assert ledger.unused == {
        "unused 'system' beside 'text'": 1,
        "unused 'tools' beside 'text'": 1,
        "unused 'enable_thinking' beside 'prompt'": 1,
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HI},
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "ho"}]},
        {"prompt": HI[:1], "completion": HI[1:]},
    ],
)
def test_every_form_of_a_chat_has_its_system_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, [{**row, "system": "s"}])[0] == ["[system]s" + HI_TEXT]


def test_a_chat_may_be_in_the_column_that_is_named(tmp_path: Path) -> None:
    rows = [{"messages": HI}, {"messages": "plain"}]
    assert read(tmp_path, rows, text_column="messages")[0] == [HI_TEXT, "plain"]
    assert read(tmp_path, [{"dialog": HI}], text_column="dialog")[0] == [HI_TEXT]


def test_arguments_of_calls_are_objects(tmp_path: Path) -> None:
    """As transformers documents them; text in JSON, as OpenAI has it, would be quoted again."""
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"type": "function", "function": function}
    as_text = {"type": "function", "function": {**function, "arguments": '{"x": 1}'}}
    user, said = {"from": "human", "value": "hi"}, json.dumps(function)
    rows = [
        {"messages": [HI[0], {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [HI[0], {"role": "assistant", "content": "", "tool_calls": [as_text]}]},
        {"conversations": [user, {"from": "function_call", "value": said}]},
        {"conversations": [user, {"from": "function_call", "value": f"[{said}]"}]},
    ]
    assert read(tmp_path, rows)[0] == [f"[user]hi[assistant]C{json.dumps([call])}"] * 4
    joins = TEMPLATE.replace(
        "m['tool_calls'] | tojson", "m['tool_calls'][0].function.arguments + ''"
    )
    assert read(tmp_path, rows, joins)[0] == ['[user]hi[assistant]C{"x": 1}'] * 4
    broken = {"type": "function", "function": {**function, "arguments": "{x"}}
    found, _ = read(
        tmp_path, [{"messages": [HI[0], {"role": "assistant", "tool_calls": [broken]}]}]
    )
    assert found == [f"[user]hi[assistant]C{json.dumps([broken])}"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (BAD, "cannot render this chat: roles must alternate"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is not text: int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a part of a message is not text: image",
        ),
        ({"messages": [{"role": 5, "content": "x"}]}, "no list of messages with a role"),
        ({"messages": ["x"]}, "no list of messages with a role"),
        ({"conversations": [{"value": "x"}]}, "'conversations' is no list of messages"),
        ({"prompt": "x", "completion": HI}, "'prompt' is no list of messages"),
        ({"messages": HI, "tools": "{"}, "'tools' is not JSON"),
        ({"messages": HI, "tools": {"a": 1}}, "'tools' is not what chat templates take: dict"),
        (
            {"messages": HI, "chat_template_kwargs": {"tokenize": False}},
            "'chat_template_kwargs' cannot set tokenize",
        ),
        ({"messages": HI, "enable_thinking": "false"}, "'enable_thinking' is not true or false"),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "a function_call that is no JSON object with the name of a function",
        ),
        (b'{"text": "\xe9"}', "not UTF-8: byte 0xe9 at offset"),
    ],
)
def test_one_bad_row_of_twenty_is_counted_and_three_of_twenty_stop(
    tmp_path: Path, bad: Any, reason: str
) -> None:
    path = tmp_path / "t.jsonl"
    row = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    good = json.dumps({"messages": HI}).encode()

    def write(num_bad: int) -> None:
        path.write_bytes(b"\n".join([*[good] * (20 - num_bad), *[row] * num_bad]))

    write(1)
    found, ledger = texts_of(path)
    assert found == [HI_TEXT] * 19
    assert ledger.bad.total() == 1
    assert ledger.kept == 19
    assert reason in ledger.examples[0][1]
    assert ledger.examples[0][0] == "t.jsonl:20"
    write(3)
    with pytest.raises(DataError, match=r"3 of 20 rows of t\.jsonl cannot be read") as caught:
        texts_of(path)
    assert reason in caught.value.what
    assert "up to 1 % of a file's rows may be bad" in caught.value.fix
    assert texts_of(path, max_bad_share=0.15)[1].bad.total() == 3


@pytest.mark.parametrize(
    ("rows", "bad", "share", "passes"),
    [
        (20, 1, 0.01, True),
        (20, 2, 0.01, True),
        (20, 3, 0.01, False),
        (3, 1, 0.01, False),
        (300, 3, 0.01, True),
        (300, 4, 0.01, False),
        (500, 5, 0.01, True),
        (500, 6, 0.01, False),
        (20, 1, 0.0, False),
        (10, 5, 0.5, True),
        (2, 2, 1.0, False),
    ],
)
def test_the_limit_and_its_floor(
    tmp_path: Path, rows: int, bad: int, share: float, passes: bool
) -> None:
    content = [{"messages": HI}] * (rows - bad) + [BAD] * bad
    if passes:
        assert len(read(tmp_path, content, max_bad_share=share)[0]) == rows - bad
    else:
        with pytest.raises(DataError, match=f"{bad} of {rows} rows"):
            read(tmp_path, content, max_bad_share=share)


def test_a_file_of_nothing_else_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, [{"messages": HI}] + [BAD] * 5000)
    assert int(caught.value.what.split()[0]) < 1100


def test_surrogates_of_chats_are_repaired_as_those_of_text(tmp_path: Path) -> None:
    broken = [{"role": "user", "content": "a\ud800b"}]
    rows = [
        {"messages": broken},
        {"messages": HI, "tools": [{"name": "\udfff"}]},
        {"conversations": [{"from": "human", "value": "\udc00"}]},
        {"prompt": "\ud800", "completion": "x"},
        {"text": "\ud800"},
    ]
    found, ledger = read(tmp_path, rows)
    assert found[0] == "[user]a\ufffdb"
    assert "\ufffd" in found[1]
    assert found[2:] == ["[user]\ufffd", "\ufffdx", "\ufffd"]
    assert ledger.repaired == 5
    assert ledger.summary() == "5 documents, 5 with lone surrogates repaired"


def test_plain_text_among_chats_with_assistant_only(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    rows = [{"messages": HI}] * 19 + [{"text": "plain"}]
    found, ledger = read(tmp_path, rows, template, assistant_only=True)
    assert found == ["hiho"] * 19
    assert ledger.bad.total() == 1
    with pytest.raises(DataError, match="this row is plain text") as caught:
        read(tmp_path, [{"text": "plain"}] * 9, template, assistant_only=True)
    assert "turn assistant_only off" in caught.value.fix


def test_chats_without_a_template_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template") as caught:
        read(tmp_path, [{"messages": HI}] * 3, None)  # type: ignore[arg-type]
    assert "add chat_template.jinja" in caught.value.fix


def test_text_that_the_tokenizer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    kind = type(tokenizer)
    usual = kind.__call__

    def refusing(self: Any, text: Any, **options: Any) -> Any:
        if "bad" in text:
            raise ValueError("no such character")
        return usual(self, text, **options)

    monkeypatch.setattr(kind, "__call__", refusing)
    found, ledger = read(tmp_path, [{"text": "x"}] * 19 + [{"text": "bad"}])
    assert found == ["x"] * 19
    assert ledger.examples == [
        ("t.jsonl:20", "the tokenizer cannot take this text: no such character")
    ]
    (tmp_path / "t.txt").write_text("bad")
    with pytest.raises(DataError, match=r"1 of 1 rows of t\.txt cannot be read"):
        texts_of(tmp_path / "t.txt")


def test_readers_without_a_ledger_warn(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"messages": HI}] * 19 + [BAD]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with pytest.warns(UpcycleWarning, match=r"t\.jsonl: 19 documents, 1 bad .*t\.jsonl:20"):
        assert len(list(tokenise_files([path], tokenizer))) == 19
    reader = tokenise_files([path], tokenizer)
    next(reader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.close()  # nothing was lost so far


def test_many_files_are_one_warning(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    with pytest.warns(UpcycleWarning, match=r"3 files: 3 documents, 3 dropped \(empty\)") as told:
        assert len(list(tokenise_files([tmp_path], byte_tokenizer()))) == 3
    assert len(told) == 1
