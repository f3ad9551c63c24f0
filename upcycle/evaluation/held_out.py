"""The held-out text as windows, with the facts that its perplexities need beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file, hash_folder
from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.data.ledger import EVALUATE, MAX_BAD_SHARE, Ledger
from upcycle.data.tokens import decoded, document_affixes
from upcycle.data.windows import EvalRow, eval_rows
from upcycle.evaluation.results import Text
from upcycle.utf8 import shown


@dataclass(frozen=True)
class HeldOut:
    """Windows of text and what is known about them."""

    rows: list[EvalRow]
    text: Text


def read_held_out(
    files: Sequence[str | Path],
    tokenizer: Any,
    sequence_length: int,
    max_tokens: int,
    max_bad_share: float | None = None,
) -> HeldOut:
    """Read, tokenise and cut the held-out text; no files means the packaged text.

    Args:
        files: files and folders.
        tokenizer: the source's.
        sequence_length: tokens per window at most.
        max_tokens: tokens to score at most.
        max_bad_share: the share of a file's rows that may be bad, as a recipe's `evaluate` says it;
            None where there is no recipe, for `MAX_BAD_SHARE`.

    Raises:
        DataError: text that cannot be read, or none.
    """
    paths = list(map(Path, files)) or [packaged_text("heldout")]
    ledger = Ledger()
    tokens = tokenise_files(
        paths,
        tokenizer,
        max_bad_share=MAX_BAD_SHARE if max_bad_share is None else max_bad_share,
        section=None if max_bad_share is None else EVALUATE,
        ledger=ledger,
    )
    rows = eval_rows(tokens, sequence_length, max_tokens)
    scored = [decoded(tokenizer, row.ids[1:], skip_special_tokens=True) for row in rows]
    hashes = _hashes(paths)
    before, _ = document_affixes(tokenizer)
    return HeldOut(
        rows,
        Text(
            files=list(hashes),
            hashes=list(hashes.values()),
            packaged=not files,
            documents=len({row.document for row in rows}),
            windows=len(rows),
            tokens=sum(len(row.ids) - 1 for row in rows),
            bytes=sum(len(piece.encode("utf-8")) for piece in scored),
            words=sum(len(piece.split()) for piece in scored),
            sequence_length=sequence_length,
            bos=bool(before),
            losses=ledger.summary() if ledger.has_losses else "",
        ),
    )


def _hashes(paths: Sequence[Path]) -> dict[str, str]:
    """Content hash of every file, by its name, or below a folder by the folder's and its own."""
    found: dict[str, str] = {}
    for path in paths:
        if path.is_dir():
            hashes = hash_folder(path).items()
            found |= {shown(f"{path.resolve().name}/{name}"): value for name, value in hashes}
        else:
            found[shown(path.name)] = hash_file(path)
    return found
