"""Divide tensors over files of a limited size, and name the files as transformers does."""

from collections.abc import Sequence

from upcycle.checkpoint.reader import SINGLE_FILE


def split_by_size(sizes: Sequence[int], limit: int) -> list[slice]:
    """Fill one file after another in order; what is larger than the limit gets a file of its own.

    Args:
        sizes: bytes of each tensor.
        limit: the most bytes of tensors in a file; its header is not counted.
    """
    parts, begin, filled = [], 0, 0
    for position, size in enumerate(sizes):
        if position > begin and filled + size > limit:
            parts.append(slice(begin, position))
            begin, filled = position, 0
        filled += size
    return [*parts, slice(begin, len(sizes))]


def shard_name(position: int, count: int) -> str:
    """The name of file `position` (from 0) of `count`."""
    if count == 1:
        return SINGLE_FILE
    stem, suffix = SINGLE_FILE.split(".")
    return f"{stem}-{position + 1:05}-of-{count:05}.{suffix}"
