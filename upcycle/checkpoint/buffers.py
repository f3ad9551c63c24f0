"""Buffers that old checkpoints store beside the weights; classes of today make them anew."""

import re
from collections.abc import Sequence

_ROTARY = re.compile(
    r"(^|\.)(rotary_emb|rotary|rotary_embed|rotary_embedding|rope)\."
    r"(\w*inv_freq|cos_cached|sin_cached|cos|sin|freqs|freqs_cis|scale)$"
)
# Masks and positions: GPT-2's `attn.bias` is a lower triangle [1, 1, T, T] and no bias.
_MASKS = re.compile(r"(^|\.)(masked_bias|causal_mask|position_ids|scale_attn|alibi)$")
_TRIANGLE = re.compile(r"(^|\.)(attn|self_attn|attention|self_attention)(\.attention)?\.bias$")


def is_buffer(name: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor is a table of positions or a mask, which holds no weights.

    Args:
        name: its name in the file.
        shape: its shape.
    """
    if _ROTARY.search(name) or _MASKS.search(name):
        return True
    square = len(shape) == 4 and tuple(shape[:2]) == (1, 1) and shape[2] == shape[3]
    return square and _TRIANGLE.search(name) is not None
