"""Documents from text, Parquet, folders, and the texts that ship with the package."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from upcycle.data.documents import packaged_text, read_documents
from upcycle.data.ledger import Ledger
from upcycle.errors import DataError


def texts(path: Path, **options: Any) -> list[str | None]:
    return [document.text for document in read_documents([path], **options)]


def test_plain_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n\nparts")
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("not this")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("pass")
    found = list(read_documents([tmp_path]))
    assert [(document.source, document.text) for document in found] == [
        ("a.md", "one"),
        ("b.txt", "two\n\nparts"),
        ("c.py", "pass"),
    ]


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"body": ["x", None, "  ", "y"], "n": [1, 2, 3, 4]}), path)
    ledger = Ledger()
    assert texts(path, text_column="body", ledger=ledger) == ["x", "y"]
    assert dict(ledger.dropped) == {"null 'body'": 1, "empty": 1}


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"body": ["x", "y"]}), path)
    with pytest.raises(DataError, match=r"no row of t\.parquet has text \(2 without 'text'\)"):
        texts(path)


def test_parquet_chats(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    pq.write_table(pa.table({"messages": [chat]}), path)
    (document,) = read_documents([path])
    assert document.messages == tuple(chat)


def test_parquet_keeps_the_order_of_many_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [f"row {i}" for i in range(5000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=700)
    assert texts(path) == rows


def test_a_saved_dataset(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["x", "", "y"], "n": [1, 2, 3]})
    rows.save_to_disk(str(tmp_path / "saved"))
    ledger = Ledger()
    assert texts(tmp_path / "saved", ledger=ledger) == ["x", "y"]
    assert dict(ledger.dropped) == {"empty": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"PAR1 and then nothing", "no readable Parquet"),
        ("t.txt", b"", "t.txt is empty"),
        ("t.txt", b"  \n", "no row of t.txt has text"),
        ("t.docx", b"x", "of an unknown kind"),
        ("t.txt", "caf\xe9".encode("latin-1"), "byte 0xe9 at offset 3"),
        ("t.txt", "café".encode("utf-16"), "byte 0xff at offset 0"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "WINDOWS-1252"), ("utf-16", "UTF-16")])
def test_the_command_that_mends_an_encoding_names_both(
    tmp_path: Path, encoding: str, name: str
) -> None:
    """`iconv` otherwise reads what the locale says, which is UTF-8."""
    (tmp_path / "t.txt").write_bytes("café".encode(encoding))
    with pytest.raises(DataError) as caught:
        texts(tmp_path / "t.txt")
    assert f"`iconv -f {name} -t UTF-8`" in caught.value.fix


def test_missing_files_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        texts(tmp_path / "none.txt")
    with pytest.raises(DataError, match="has no text files"):
        texts(tmp_path)


def test_the_packaged_texts_are_disjoint() -> None:
    held_out = set(texts(packaged_text("heldout")))
    calibration = set(texts(packaged_text("calibration")))
    assert len(held_out) > 20
    assert len(calibration) > 20
    assert not held_out & calibration
    with pytest.raises(DataError, match="no packaged text 'train'"):
        packaged_text("train")
