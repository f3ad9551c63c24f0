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
