"""Rows of text that a model is calibrated on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from upcycle.checkpoint.reader import Checkpoint
from upcycle.data.chat import chat_tokens
from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.data.ledger import Document
from upcycle.data.tokens import Tokens, document_affixes
from upcycle.errors import DataError
from upcycle.models.loading import class_config, load_tokenizer
from upcycle.options.base import BUILTIN, SELF

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PreTrainedTokenizerBase

# Rows are drawn from this many times as many tokens, so that huge files are not read to their end.
_DRAWN_FROM = 16


def path_of(text: str | Path) -> Path:
    """The file or folder that a calibration text names; "builtin" is the package's own.

    Raises:
        DataError: "self", which only a conversion can write.
    """
    if str(text) == SELF:
        raise DataError(
            f"{SELF!r} is text that the source of a conversion writes itself; it cannot be read "
            "here",
            where="calibration",
            fix=f"give the OUT.calibration.jsonl that `upcycle convert --calibration {SELF}` "
            f"leaves beside OUT; a file of that name is ./{SELF}",
        )
    return packaged_text("calibration") if str(text) == BUILTIN else Path(text)


def row_counts(rows: int, weights: Sequence[float]) -> list[int]:
    """How many of `rows` each text gives: at least one, and in all as near as whole rows allow.

    Args:
        rows: in all.
        weights: of the texts, positive, of any sum.
    """
    exact = [rows * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for index in by_rest[: max(0, rows - sum(counts))]:
        counts[index] += 1
    return counts


def calibration_rows(
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    *,
    tokens: int,
    sequence_length: int,
    weights: Sequence[float] = (),
    seed: int = 0,
    option: str | None = "--calibration-tokens",
) -> "Tensor":
    """Token ids in rows, drawn at random from the text's beginning.

    Documents are laid end to end with the tokenizer's own separators; a row may hold several,
    which see each other, as in most pretraining. With weights each text gives rows of its own, and
    those of all are mixed.

    Args:
        checkpoint: its tokenizer is used.
        texts: files and folders, see `tokenise_files`; "builtin" is the text of the package.
        tokens: how many tokens, rounded down to whole rows but at least one.
        sequence_length: T; shorter where the model has fewer positions.
        weights: the share of the rows that each text gives; empty reads the texts as one.
        seed: of the drawing.
        option: what the user asks for fewer tokens with, where there is such an option.

    Returns:
        [B, T] int64.

    Raises:
        CheckpointError: there is no tokenizer.
        DataError: a text cannot be read, or there is too little of it.
    """
    import torch

    length = row_length(checkpoint, sequence_length)
    rows = max(1, tokens // length)
    tokenizer = load_tokenizer(checkpoint.folder)
    generator = torch.Generator().manual_seed(seed)
    fix = "add text" + (f", or pass {option} {{}}" if option else "")
    if not weights:
        return _drawn(tokenizer, texts, rows, length, generator, fix)
    parts = [
        _drawn(
            tokenizer, [text], count, length, generator, f"add text to {text}, or lower its weight"
        )
        for text, count in zip(texts, row_counts(rows, weights), strict=True)
    ]
    together = torch.cat(parts)
    return together[torch.randperm(len(together), generator=generator)]


def row_length(checkpoint: Checkpoint, sequence_length: int) -> int:
    """The tokens of a row: `sequence_length`, or the positions that the model has, if fewer."""
    positions = getattr(class_config(checkpoint.config), "max_position_embeddings", None)
    return min(sequence_length, positions or sequence_length)


def _drawn(
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str | Path],
    rows: int,
    length: int,
    generator: "Generator",
    fix: str,
) -> "Tensor":
    """Some of the rows [rows, length] of texts that are read as one."""
    import torch

    paths = [path_of(text) for text in texts]
    found = first_ids(tokenise_files(paths, tokenizer), _DRAWN_FROM * rows * length)
    whole = len(found) // length
    if whole < rows:
        raise DataError(
            f"{rows * length:,} tokens of text are asked for, but there are {len(found):,}, "
            f"{whole} rows of {length} instead of {rows}",
            where=", ".join(str(path) for path in paths),
            fix=fix.format(whole * length) if whole else "add text",
        )
    drawn = torch.randperm(whole, generator=generator)[:rows]
    return torch.from_numpy(found[: whole * length].astype(np.int64)).view(-1, length)[drawn]


def unseen_template_tokens(checkpoint: Checkpoint, rows: "Tensor") -> list[str]:
    """The special tokens that the source's chat template writes, if the rows have none of them.

    Those that plain documents get too do not count.

    Args:
        checkpoint: its tokenizer is used.
        rows: [B, T] token ids.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    if tokenizer.chat_template is None:
        return []
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        chat, _ = chat_tokens(Document("probe", messages=turns), tokenizer, assistant_only=False)
    except DataError:  # the template wants other turns: nothing is known of its tokens
        return []
    special = {*tokenizer.all_special_ids, *_added_special(tokenizer)}
    plain = {token for part in document_affixes(tokenizer) for token in part}
    own = {int(token) for token in chat} & special - plain
    if any((rows == token).any() for token in own):
        return []
    return [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(own)]


def _added_special(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    added = tokenizer.added_tokens_decoder
    return [token for token, entry in added.items() if entry.special]


def first_ids(documents: Iterable[Tokens], limit: int) -> NDArray[np.int32]:
    """The ids of the first documents, end to end, until there are `limit`."""
    parts = [np.empty(0, np.int32)]
    found = 0
    for document in documents:
        parts.append(document.ids)
        found += len(document.ids)
        if found >= limit:
            break
    return np.concatenate(parts)[:limit]
