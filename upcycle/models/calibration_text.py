"""Rows of text that a model is calibrated on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from upcycle.checkpoint.reader import Checkpoint
from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.data.tokens import Tokens
from upcycle.errors import DataError
from upcycle.models.loading import class_config, load_tokenizer
from upcycle.options.base import BUILTIN

if TYPE_CHECKING:
    from torch import Tensor

# Rows are drawn from this many times as many tokens, so that huge files are not read to their end.
_DRAWN_FROM = 16


def path_of(text: str | Path) -> Path:
    """The file or folder that a calibration text names; "builtin" is the package's own."""
    return packaged_text("calibration") if str(text) == BUILTIN else Path(text)


def calibration_rows(
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    *,
    tokens: int,
    sequence_length: int,
    seed: int = 0,
    option: str | None = "--calibration-tokens",
) -> "Tensor":
    """Token ids in rows, drawn at random from the text's beginning.

    Documents are laid end to end with the tokenizer's own separators; a row may hold several,
    which see each other, as in most pretraining.

    Args:
        checkpoint: its tokenizer is used.
        texts: files and folders, see `tokenise_files`; "builtin" is the text of the package.
        tokens: how many tokens, rounded down to whole rows but at least one.
        sequence_length: T; shorter where the model has fewer positions.
        seed: of the drawing.
        option: what the user asks for fewer tokens with, where there is such an option.

    Returns:
        [B, T] int64.

    Raises:
        CheckpointError: there is no tokenizer.
        DataError: a text cannot be read, or there is too little of it.
    """
    import torch

    positions = getattr(class_config(checkpoint.config), "max_position_embeddings", None)
    length = min(sequence_length, positions or sequence_length)
    rows = max(1, tokens // length)
    paths = [path_of(text) for text in texts]
    documents = tokenise_files(paths, load_tokenizer(checkpoint.folder))
    found = first_ids(documents, _DRAWN_FROM * rows * length)
    whole = len(found) // length
    if whole < rows:
        raise DataError(
            f"{rows * length:,} tokens of text are asked for, but there are {len(found):,}, "
            f"{whole} rows of {length} instead of {rows}",
            where=", ".join(str(path) for path in paths),
            fix="add text" + (f", or pass {option} {whole * length}" if option and whole else ""),
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(whole, generator=generator)[:rows]
    return torch.from_numpy(found[: whole * length].astype(np.int64)).view(-1, length)[drawn]


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
