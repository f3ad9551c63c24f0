"""What --overwrite may replace: what stands in a file counts, not its name."""

import json
from pathlib import Path

import pytest

from upcycle.checkpoint.manifest import Manifest, made_here

SIGNED = json.dumps({"versions": {"upcycle": "0.1.0"}})
FOREIGN = [
    b"",
    b"{",
    b"{}",
    b"[]",
    b"1" * 5000,
    b"[" * 100_000,
    b"\xff\xfe\x00",
    b'{"versions": null}',
    b'{"versions": ["upcycle"]}',
    b'{"versions": {"torch": "2.13.0"}}',
    SIGNED.encode("utf-16"),
]


def specification(text: str, key: bytes = b"upcycle") -> bytes:
    """Bytes of protobuf with an entry of the map `userDefined`."""
    value = text.encode()
    size = bytes([len(value) & 0x7F | 0x80, len(value) >> 7])
    entry = b"\n" + bytes([len(key)]) + key + b"\x12" + size + value
    return b"\x08\x09\x12\xff\xfe" + entry + b"\xb2\x1f\xff{\x00"


@pytest.mark.parametrize("name", ["upcycle.json", "report.json"])
def test_a_manifest_or_report_of_ours_is_a_mark(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    Manifest.of(stage="convert", source={}, options={}, libraries=(), result={}).write(tmp_path)
    (tmp_path / "upcycle.json").rename(tmp_path / name)
    assert made_here(tmp_path)


@pytest.mark.parametrize("name", ["upcycle.json", "report.json"])
@pytest.mark.parametrize("content", FOREIGN)
def test_a_strangers_file_of_that_name_is_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "precious.txt").touch()
    (tmp_path / name).write_bytes(content)
    assert not made_here(tmp_path)


def test_a_file_too_large_to_be_ours_is_none(tmp_path: Path) -> None:
    path = tmp_path / "upcycle.json"
    path.write_text(SIGNED)
    assert made_here(tmp_path)
    with path.open("r+b") as file:
        file.truncate(1 << 33)
    assert not made_here(tmp_path)


@pytest.mark.parametrize("name", ["Manifest.json", "state.json", "config.json"])
def test_other_names_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SIGNED)
    assert not made_here(tmp_path)


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        (specification(json.dumps({"versions": {"upcycle": "é" * 200}})), True),
        (specification(SIGNED, key=b"someone"), False),
        (specification("not json"), False),
        (specification("{}"), False),
        (specification(SIGNED)[:-60], False),
        (b"", False),
    ],
)
def test_a_package_is_ours_by_its_metadata(tmp_path: Path, content: bytes, ours: bool) -> None:
    (tmp_path / "Manifest.json").write_text("{}")
    path = tmp_path / "Data" / "com.apple.CoreML" / "model.mlmodel"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert made_here(tmp_path) == ours


def test_an_empty_folder_may_be_replaced(tmp_path: Path) -> None:
    assert made_here(tmp_path)
    assert not made_here(tmp_path / "none")
