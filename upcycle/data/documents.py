"""Documents from files: plain text, JSONL and Parquet."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.data.jsonl import decode, read_jsonl
from upcycle.data.ledger import Document, Ledger
from upcycle.data.rows import columns_of, document_of
from upcycle.data.tokens import Tokens, tokenise_documents
from upcycle.errors import DataError, warn
from upcycle.options.base import MAX_BAD_SHARE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAVED_DATASET = "dataset_info.json"
Reader = Callable[[Path, str | None, Ledger], Iterator[Document]]


def read_documents(
    paths: Iterable[Path], text_column: str | None = None, ledger: Ledger | None = None
) -> Iterator[Document]:
    """Documents of every file, in the order given; a folder means its visible files by name.

    A .txt, .md or .py file is one document; a .jsonl, .json or .parquet file, or a folder that
    `datasets.Dataset.save_to_disk` wrote, has one per row, see `document_of`.

    Args:
        paths: files and folders.
        text_column: the key or column of plain text; None for "text", unnamed.
        ledger: receives the counts of every file.

    Raises:
        DataError: a file is missing, empty, of an unknown kind, not UTF-8, has too many bad rows
            or no text at all; with file and line.
    """
    for file in _all_files(paths):
        counts = Ledger(file.name)
        yield from _reader_of(file)(file, text_column, counts)
        counts.check()
        if ledger is not None:
            ledger.add(counts)


def tokenise_files(
    paths: Iterable[Path],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_column: str | None = None,
    assistant_only: bool = False,
    max_bad_share: float = MAX_BAD_SHARE,
    section: str | None = None,
    ledger: Ledger | None = None,
) -> Iterator[Tokens]:
    """Token ids of every document of every file, in the order of `read_documents`.

    Rows that the template or the tokenizer cannot take count like those that cannot be read.

    Args:
        paths: files and folders.
        tokenizer: the source checkpoint's.
        text_column: the key or column of plain text; None for "text", unnamed.
        assistant_only: mask all but the assistant's tokens of chats.
        max_bad_share: the share of a file's rows that may be bad, see `Ledger`.
        section: of the recipe that names the files, for errors.
        ledger: receives the counts, also of a file that is not read to its end; where None, a
            warning tells the user of what was not used.

    Raises:
        DataError: as for `read_documents`; or `assistant_only` with a template that does not mark
            the assistant's turns.
    """
    total = Ledger() if ledger is None else ledger
    seen: list[Ledger] = []
    try:
        for file in _all_files(paths):
            counts = Ledger(file.name, max_bad_share, section)
            seen.append(counts)
            documents = _reader_of(file)(file, text_column, counts)
            yield from tokenise_documents(
                documents, tokenizer, assistant_only=assistant_only, ledger=counts
            )
            counts.check()
    except GeneratorExit:  # the caller has enough
        _tell(seen, total, ledger is None)
        raise
    _tell(seen, total, ledger is None)


def _tell(seen: list[Ledger], total: Ledger, warns: bool) -> None:
    for counts in seen:
        total.add(counts)
    if warns and total.has_losses:
        name = seen[0].name if len(seen) == 1 else f"{len(seen)} files"
        warn(f"not all of the text was used: {name}: {total.summary()}")


def packaged_text(name: str) -> Path:
    """The text that ships with the package: "heldout" or "calibration", disjoint files.

    Raises:
        DataError: there is no text of that name.
    """
    folder = Path(__file__).parents[1] / "texts"
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.jsonl"))
        raise DataError(
            f"there is no packaged text {name!r}",
            where=str(folder),
            fix=f"choose one of {', '.join(names)}",
        )
    return path


def _all_files(paths: Iterable[Path]) -> Iterator[Path]:
    return (file for path in paths for file in _files(Path(path)))


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


def _read_plain(path: Path, text_column: str | None, ledger: Ledger) -> Iterator[Document]:
    del text_column
    text = decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), path, 0)
    if document := document_of({"text": text}, path.name, None, ledger):
        yield document


def _read_parquet(path: Path, text_column: str | None, ledger: Ledger) -> Iterator[Document]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    # Not `datasets.load_dataset`, which asks the network first and copies the file into a cache.
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in columns_of(text_column) if name in names]
            index = 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    where = f"{path.name}:{index}"
                    if document := document_of(_given(row), where, text_column, ledger):
                        yield document
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path.name} is no readable Parquet file: {error}",
            where=str(path),
            fix="write the file again",
        ) from error


def _read_saved_dataset(path: Path, text_column: str | None, ledger: Ledger) -> Iterator[Document]:
    """A folder that `datasets.Dataset.save_to_disk` wrote; memory-mapped."""
    import datasets

    for index, row in enumerate(datasets.load_from_disk(str(path))):
        where = f"{path.name}:{index}"
        if document := document_of(_given(row), where, text_column, ledger):
            yield document


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what Arrow adds to nested values: the keys that others of the column have."""
    return {key: value if value is None else _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(item) for k, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_READERS: dict[str, Reader] = {
    ".txt": _read_plain,
    ".md": _read_plain,
    ".py": _read_plain,
    ".json": read_jsonl,
    ".jsonl": read_jsonl,
    ".parquet": _read_parquet,
}
