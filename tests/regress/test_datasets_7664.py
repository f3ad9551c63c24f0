"""JSONL that `datasets` refuses without saying where (huggingface/datasets#7664).

Also hiyouga/LlamaFactory#8805 and many others: parse errors without a usable line number. Here
every row that cannot be used is counted or named with its file and line.
"""

import json
from pathlib import Path

import pytest

from upcycle.data.documents import read_documents
from upcycle.data.ledger import Document, Ledger
from upcycle.errors import DataError

GOOD = b'{"text": "fine"}\n'


def read(folder: Path, content: bytes) -> tuple[list[Document], Ledger]:
    path = folder / "t.jsonl"
    path.write_bytes(content)
    ledger = Ledger()
    return list(read_documents([path], ledger=ledger)), ledger


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"text": "unterminated\n', "not JSON"),
        (b'{"text": "a", "text": "b"}\n', "key 'text' is given twice"),
        (b'{"text": 5}\n', "'text' is not text: int"),
        (b'["a row"]\n', "not a JSON object: list"),
        (b'{"messages": "hello"}\n', "'messages' is no list"),
        (b'{"messages": [{"content": "hello"}]}\n', "'messages' is no list"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
    ids=["unterminated", "twice", "number", "array row", "string chat", "no role", "deep"],
)
class TestBadRows:
    def test_a_few_are_counted(self, tmp_path: Path, bad: bytes, reason: str) -> None:
        documents, ledger = read(tmp_path, GOOD * 150 + bad + GOOD)
        assert len(documents) == 151
        assert ledger.bad.total() == 1
        (where, why) = ledger.examples[0]
        assert where == "t.jsonl:151"
        assert reason in why

    def test_many_are_an_error_with_the_line(self, tmp_path: Path, bad: bytes, reason: str) -> None:
        with pytest.raises(DataError) as caught:
            read(tmp_path, GOOD + bad + GOOD)
        assert "1 of 3 rows of t.jsonl cannot be read" in caught.value.what
        assert reason in caught.value.what
        assert caught.value.where == "t.jsonl:2"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"text": ""}\n', "empty"),
        (b'{"text": "  "}\n', "empty"),
        (b'{"text": null}\n', "null 'text'"),
        (b'{"title": "x"}\n', "without 'text'"),
        (b'{"messages": []}\n', "empty"),
    ],
)
def test_rows_without_text_are_dropped_and_counted(tmp_path: Path, row: bytes, reason: str) -> None:
    documents, ledger = read(tmp_path, GOOD + row * 2)
    assert len(documents) == 1
    assert dict(ledger.dropped) == {reason: 2}
    assert ledger.summary() == f"1 documents, 2 dropped ({reason})"


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    documents, ledger = read(tmp_path, rb'{"text": "a\ud800b"}' + b"\n" + GOOD)
    assert documents[0].text == "a\ufffdb"
    assert ledger.repaired == 1


def test_a_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    documents, ledger = read(tmp_path, rb'{"text": "\ud83d\ude00"}')
    assert documents[0].text == "\U0001f600"
    assert ledger.repaired == 0


def test_latin_1_is_named_with_its_offset(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, GOOD + '{"text": "é"}\n'.encode("latin-1"))
    assert f"byte 0xe9 at offset {len(GOOD) + 10}" in caught.value.what
    assert "Latin-1" in caught.value.fix


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.jsonl is empty"):
        read(tmp_path, b"")


def test_a_wrong_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, b'{"content": "x"}\n' * 3)
    assert "3 without 'text'" in caught.value.what
    assert "call that column 'text'" in caught.value.fix


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf" + GOOD, ["fine"]),
        (GOOD.replace(b"\n", b"\r\n") * 2, ["fine", "fine"]),
        (b"\n\n" + GOOD + b"  \n" + GOOD, ["fine", "fine"]),
        (GOOD.rstrip(), ["fine"]),
        (rb'{"text": "a\u0000b"}', ["a\0b"]),
        (b'[{"text": "a"},\n {"text": "b"}]', ["a", "b"]),
        (b'\xef\xbb\xbf[{"text": "a"}]', ["a"]),
        (json.dumps({"text": "x" * 30_000_000}).encode(), ["x" * 30_000_000]),
        (b'{"text": "a\xe2\x80\xa8b"}', ["a\u2028b"]),
    ],
    ids=["BOM", "CRLF", "blank", "no end", "NUL", "array", "BOM array", "30 MB", "separator"],
)
def test_odd_but_valid(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    documents, ledger = read(tmp_path, content)
    assert [document.text for document in documents] == expected
    assert not ledger.has_losses


def test_a_broken_array_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, b'[{"text": "a"},\n {"text": ')
