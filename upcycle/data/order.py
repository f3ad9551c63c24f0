"""Which rows a step trains on: a pure function, so nothing about it needs saving."""

from functools import lru_cache

import torch
import xxhash


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
