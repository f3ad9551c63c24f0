"""Views of heads by group and by rotary plane, and of moments of stacked heads by head.

A rotation by position multiplies each rotary plane by a unit complex number (Su et al. 2021,
section 3.2.2), so that whatever is done by complex factors per plane commutes with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from upcycle.attention import Rope


def grouped(heads: Tensor, groups: int) -> Tensor:
    """[K, ...] as [g, K / g, ...]: groups are contiguous."""
    return torch.unflatten(heads, 0, (groups, len(heads) // groups))


def per_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """[H, ...] of query heads summed over those of each KV head: [K, ...]."""
    return grouped(queries, kv_heads).sum(1)


def head_blocks(moment: Tensor, heads: int) -> Tensor:
    """[..., n m, n m] as [..., n, m, n, m]."""
    width = moment.shape[-1] // heads
    return torch.unflatten(torch.unflatten(moment, -1, (heads, width)), -3, (heads, width))


def select_blocks(moment: Tensor, heads: Sequence[int], num_heads: int) -> Tensor:
    """The channels of some heads of a moment [..., n m, n m] of all n of them."""
    channels = grouped(torch.arange(moment.shape[-1]), num_heads)[list(heads)].flatten()
    return moment[..., channels, :][..., channels]


def diagonal_blocks(moment: Tensor, groups: int) -> Tensor:
    """[..., g w, g w] -> [g, ..., w, w]: what the members of each group have with each other."""
    width = moment.shape[-1] // groups
    starts = (group * width for group in range(groups))
    return torch.stack([moment[..., s : s + width, s : s + width] for s in starts])


def channel_signals(moment: Tensor, energy: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Each channel of the heads of a group as a signal of its own, as `rank_one` takes them.

    Args:
        moment: [K m, K m] of all heads.
        energy: [K, m] of what reads each channel.
        groups: g.

    Returns:
        [g, m, n, n] moments and [g, m, n] energies.
    """
    blocks = head_blocks(diagonal_blocks(moment, groups), len(energy) // groups)
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 1), grouped(energy, groups).mT


def split_planes(rows: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Channels [heads, d, ...] as planes [heads, P, ...] (complex) and the p others, as they are.

    P = rotary_dim / 2, or 0 without rotation; p = d - 2 P.
    """
    rotary = 0 if rope.pairing == "none" else rope.rotary_dim
    turning, passing = rows[:, :rotary], rows[:, rotary:]
    if rope.pairing == "interleaved":
        return torch.complex(turning[:, 0::2], turning[:, 1::2]), passing
    half = rotary // 2
    return torch.complex(turning[:, :half], turning[:, half:]), passing


def join_planes(planes: Tensor, passing: Tensor, rope: Rope) -> Tensor:
    """Channels [heads, d, ...] again: the inverse of `split_planes`."""
    parts = (planes.real, planes.imag)
    interleaved = rope.pairing == "interleaved"
    turning = torch.stack(parts, 2).flatten(1, 2) if interleaved else torch.cat(parts, 1)
    return torch.cat((turning, passing), 1)


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
