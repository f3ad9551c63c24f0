"""Heads that are linear maps of one another: where their moments can lie, and what is rounding."""

import torch
from torch import Tensor

# How far rows may lie outside a row space that they share, relative to their size: above the
# rounding of fp32 weights, and far below what makes a difference.
_TOLERANCE = 1e-6


def with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [K, m, D] in fp64, with their bias [K, m] as one more column."""
    wide = rows.double()
    return wide if bias is None else torch.cat((wide, bias.double()[..., None]), -1)


def clean_groups(moment: Tensor, groups: int, rows: Tensor) -> None:
    """`within_copies` of what each group's heads have with each other, in place.

    Args:
        moment: [K m, K m] of all heads.
        groups: g.
        rows: [K, m, D] fp64.
    """
    width = len(moment) // groups
    for index, part in enumerate(rows.chunk(groups) if width else ()):
        channels = slice(index * width, (index + 1) * width)
        moment[channels, channels] = within_copies(moment[channels, channels], part)


def within_copies(moment: Tensor, rows: Tensor) -> Tensor:
    """The moment of stacked heads without what no input can have caused.

    Where every head is a linear map of one of them, the stacked heads x = V u lie in the column
    space of V, which has no more dimensions than a head has channels. What a computed moment has
    outside of it is rounding, which would compete with directions that the text seldom takes.
    Other heads' moments are returned as they are.

    Args:
        moment: [n m, n m] E[x xᵀ] of n stacked heads.
        rows: [n, m, D] fp64, V by head; constants that are added to x are a column of their own.
    """
    span = span_of_copies(rows)
    if span is None:
        return moment
    return span @ (span.mT @ moment @ span) @ span.mT


def span_of_copies(rows: Tensor) -> Tensor | None:
    """An orthonormal basis [n m, r ≤ m] of what heads that are maps of one span; None for others.

    Args:
        rows: [n, m, D] fp64, see `within_copies`.
    """
    sizes = rows.square().sum((1, 2))
    lead = _row_space(rows[int(sizes.argmax())])
    inside = rows @ lead.mT  # [n, m, r]
    outside = (rows - inside @ lead).square().sum((1, 2))
    if bool((outside > _TOLERANCE**2 * sizes).any()):
        return None
    return _row_space(inside.flatten(0, 1).mT).mT


def _row_space(matrix: Tensor) -> Tensor:
    """An orthonormal basis [r, D] of the rows of a matrix [m, D]."""
    _, levels, basis = torch.linalg.svd(matrix, full_matrices=False)
    rows: Tensor = basis[levels > _TOLERANCE * levels[:1]]
    return rows
