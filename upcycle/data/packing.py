"""Fixed-length rows of packed documents that do not see each other, and their order."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash

from upcycle.data.tokens import Tokens
from upcycle.errors import DataError

IGNORED = -100


@dataclass(frozen=True)
class PackedRows:
    """N rows of S tokens; documents are cut at the end of a row.

    A model isolates the documents of a row by their positions alone, as long as it gets no
    attention mask and no cache.

    Attributes:
        input_ids: [N, S] int32.
        position_ids: [N, S] int32, counted from 0 in each document piece.
        labels: [N, S] int32, the token itself, or `IGNORED` at the start of each piece, where
            the loss mask is off, and in the padding of the last row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_targets(self) -> int:
        """Tokens that carry a loss."""
        return int((self.labels != IGNORED).sum())

    def batch(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows [B] as int64 model inputs [B, S]: input_ids, position_ids and labels."""
        return {
            "input_ids": self.input_ids[rows].long(),
            "position_ids": self.position_ids[rows].long(),
            "labels": self.labels[rows].long(),
        }

    def part(self, start: int, stop: int) -> "PackedRows":
        """Rows `start` to `stop`, as views."""
        rows = slice(start, stop)
        return PackedRows(self.input_ids[rows], self.position_ids[rows], self.labels[rows])

    def content_hash(self) -> str:
        """A hash of everything that a model is trained on here."""
        digest = xxhash.xxh3_128()
        for tensor in (self.input_ids, self.position_ids, self.labels):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return f"xxh3-128:{digest.hexdigest()}"


def pack(
    documents: Iterable[Tokens], sequence_length: int, *, where: str = "the training text"
) -> PackedRows:
    """Lay documents end to end and cut them into rows.

    Args:
        documents: tokenised documents, in order.
        sequence_length: S.
        where: the documents come from, for errors.

    Raises:
        DataError: less than one row of tokens, or no token that carries a loss.
    """
    ids, positions, labels = [], [], []
    filled = num_documents = 0
    for document in documents:
        num_documents += 1
        places = filled + np.arange(len(document.ids))
        # A document's own start and every row boundary inside it begin a piece.
        starts = np.maximum(places - places % sequence_length, filled)
        position = (places - starts).astype(np.int32)
        label = np.where(position == 0, np.int32(IGNORED), document.ids)
        if document.loss_mask is not None:
            label = np.where(document.loss_mask, label, np.int32(IGNORED))
        ids.append(document.ids)
        positions.append(position)
        labels.append(label)
        filled += len(document.ids)
    if filled < sequence_length:
        raise DataError(
            f"too little text: {num_documents} documents with {filled} tokens are less than one "
            f"row of {sequence_length}",
            where=where,
            fix="add text, or lower sequence_length",
        )
    padding = -filled % sequence_length
    ids.append(np.zeros(padding, np.int32))
    positions.append(np.arange(padding, dtype=np.int32))
    labels.append(np.full(padding, IGNORED, np.int32))
    rows = PackedRows(*(_rows(parts, sequence_length) for parts in (ids, positions, labels)))
    if not rows.num_targets:
        raise DataError(
            f"none of {filled:,} tokens carries a loss",
            where=where,
            fix="give chats in which the assistant says something, or turn assistant_only off",
        )
    return rows


def _rows(parts: list[np.ndarray], sequence_length: int) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int32)).view(-1, sequence_length)


@lru_cache(maxsize=2)
def order(num_rows: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation [num_rows] of one epoch."""
    mixed = xxhash.xxh3_64_intdigest(f"{seed}:{epoch}".encode()) >> 1
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(mixed))


def batch_rows(step: int, *, batch_size: int, num_rows: int, seed: int) -> torch.Tensor:
    """Row numbers [batch_size] of the global batch of one step, counted from 0.

    The stream of samples runs through one permutation after another, whatever the number of
    processes: row number i of the stream is `order(epoch = i // num_rows)[i % num_rows]`.
    """
    start = step * batch_size
    rows = [
        order(num_rows, seed, index // num_rows)[index % num_rows]
        for index in range(start, start + batch_size)
    ]
    return torch.stack(rows)


def micro_batch(
    rows: torch.Tensor, *, micro: int, micro_batch_size: int, rank: int, world: int
) -> torch.Tensor:
    """The share [micro_batch_size] of one process in one forward pass of a global batch."""
    start = (micro * world + rank) * micro_batch_size
    return rows[start : start + micro_batch_size]
