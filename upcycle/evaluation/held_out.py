"""The held-out text as windows, with the facts that its perplexities need beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file, hash_folder
from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.data.ledger import EVALUATE, Ledger
from upcycle.data.tokens import decoded, document_affixes
from upcycle.data.windows import EvalRow, eval_rows
from upcycle.evaluation.results import Text
from upcycle.options.evaluate import EvaluateOptions
from upcycle.utf8 import shown


@dataclass(frozen=True)
class HeldOut:
    """Windows of text and what is known about them."""

    rows: list[EvalRow]
    text: Text


def read_held_out(
    options: EvaluateOptions, tokenizer: Any, *, section: str | None = EVALUATE
) -> HeldOut:
    """Read, tokenise and cut the held-out text; no files means the packaged text.

    Args:
        options: which text, how much of it, and in which windows.
        tokenizer: the source's.
        section: of a recipe that the options can come from; None where there is none, for errors.

    Raises:
        DataError: text that cannot be read, or none.
    """
    paths = list(options.text) or [packaged_text("heldout")]
    ledger = Ledger()
    tokens = tokenise_files(
        paths, tokenizer, max_bad_share=options.max_bad_share, section=section, ledger=ledger
    )
    rows = eval_rows(tokens, options.sequence_length, options.max_tokens)
    scored = [decoded(tokenizer, row.ids[1:], skip_special_tokens=True) for row in rows]
    hashes = _hashes(paths)
    before, _ = document_affixes(tokenizer)
    return HeldOut(
        rows,
        Text(
            files=list(hashes),
            hashes=list(hashes.values()),
            packaged=not options.text,
            documents=len({row.document for row in rows}),
            windows=len(rows),
            tokens=sum(len(row.ids) - 1 for row in rows),
            bytes=sum(len(piece.encode("utf-8")) for piece in scored),
            words=sum(len(piece.split()) for piece in scored),
            sequence_length=options.sequence_length,
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
