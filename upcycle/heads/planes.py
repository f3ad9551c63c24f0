"""The channels of query and key heads as complex rotary planes and position-free channels.

A rotation by position multiplies each plane by a unit complex number (Su et al. 2021, section
3.2.2), so that whatever is done by complex factors per plane commutes with it.
"""

import torch
from torch import Tensor

from upcycle.attention import Rope


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
