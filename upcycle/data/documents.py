"""Documents from files: plain text, JSONL and Parquet."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import upcycle
from upcycle.data.jsonl import decode, read_jsonl
from upcycle.data.ledger import Document, Ledger, document_of
from upcycle.errors import DataError

_SAVED_DATASET = "dataset_info.json"
Reader = Callable[[Path, str, Ledger], Iterator[Document]]


def read_documents(
    paths: Iterable[Path], text_column: str = "text", ledger: Ledger | None = None
) -> Iterator[Document]:
    """Documents of every file, in the order given; a folder means its visible files by name.

    A .txt, .md or .py file is one document; a .jsonl, .json or .parquet file, or a folder that
    `datasets.Dataset.save_to_disk` wrote, has one per row, as text in `text_column` or as a chat
    in `messages`.

    Args:
        paths: files and folders.
        text_column: the key or column of plain text.
        ledger: receives the counts of every file.

    Raises:
        DataError: a file is missing, empty, of an unknown kind, not UTF-8, has too many bad rows
            or no text at all; with file and line.
    """
    for path in paths:
        for file in _files(Path(path)):
            counts = Ledger()
            yield from _reader_of(file)(file, text_column, counts)
            counts.check(file.name)
            if ledger is not None:
                ledger.add(counts)


def packaged_text(name: str) -> Path:
    """The text that ships with the package: "heldout" or "calibration", disjoint files.

    Raises:
        DataError: there is no text of that name.
    """
    folder = Path(upcycle.__file__).parent / "texts"
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.jsonl"))
        raise DataError(
            f"there is no packaged text {name!r}",
            where=str(folder),
            fix=f"choose one of {', '.join(names)}",
        )
    return path


def _files(path: Path) -> list[Path]:
    known = ", ".join(sorted(_READERS))
    if os.path.isfile(path / _SAVED_DATASET):
        return [path]
    if os.path.isdir(path):
        files = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in _READERS
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not files:
            raise DataError(
                f"{path} has no text files", where=str(path), fix=f"put {known} files there"
            )
    elif os.path.isfile(path):  # false of a name that no file can have
        files = [path]
    else:
        raise DataError(
            f"there is no file {path}", where=str(path), fix="name an existing file or folder"
        )
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise DataError(
                f"{file.name} is of an unknown kind", where=str(file), fix=f"use {known}"
            )
        if not file.stat().st_size:
            raise DataError(f"{file.name} is empty", where=str(file), fix="remove or fill it")
    return files


def _reader_of(path: Path) -> Reader:
    return _read_saved_dataset if path.is_dir() else _READERS[path.suffix.lower()]


def _read_plain(path: Path, text_column: str, ledger: Ledger) -> Iterator[Document]:
    del text_column
    text = decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), path, 0)
    if document := document_of({"text": text}, path.name, "text", ledger):
        yield document


def _read_parquet(path: Path, text_column: str, ledger: Ledger) -> Iterator[Document]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    # Not `datasets.load_dataset`, which asks the network first and copies the file into a cache.
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in (text_column, "messages") if name in names]
            index = 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    where = f"{path.name}:{index}"
                    if document := document_of(row, where, text_column, ledger):
                        yield document
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path.name} is no readable Parquet file: {error}",
            where=str(path),
            fix="write the file again",
        ) from error


def _read_saved_dataset(path: Path, text_column: str, ledger: Ledger) -> Iterator[Document]:
    """A folder that `datasets.Dataset.save_to_disk` wrote; memory-mapped."""
    import datasets

    for index, row in enumerate(datasets.load_from_disk(str(path))):
        if document := document_of(row, f"{path.name}:{index}", text_column, ledger):
            yield document


_READERS: dict[str, Reader] = {
    ".txt": _read_plain,
    ".md": _read_plain,
    ".py": _read_plain,
    ".json": read_jsonl,
    ".jsonl": read_jsonl,
    ".parquet": _read_parquet,
}
