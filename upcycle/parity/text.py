"""The tokens that a package is checked on."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from upcycle.data.documents import packaged_text, tokenise_files
from upcycle.errors import DataError
from upcycle.models.loading import load_tokenizer


def read_tokens(folder: Path, files: Sequence[Path], count: int) -> Tensor:
    """The first tokens [count] of a text, its documents one after the other.

    Args:
        folder: the checkpoint, for its tokenizer.
        files: text; the packaged held-out text where none is named.
        count: how many.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        DataError: the text cannot be read, or is shorter.
    """
    paths = list(files) or [packaged_text("heldout")]
    found: list[int] = []
    for tokens in tokenise_files(paths, load_tokenizer(folder)):
        found += tokens.ids.tolist()
        if len(found) >= count:
            return torch.tensor(found[:count])
    raise DataError(
        f"the text has {len(found)} tokens, and the check needs {count}",
        where=", ".join(map(str, files)),
        fix=f"give more text, or pass --tokens {len(found) // 2} or less",
    )
