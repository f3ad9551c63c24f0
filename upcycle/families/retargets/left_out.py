"""Blocks beside the decoder that a class which is retargeted has no place for in its target."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from upcycle.checkpoint.naming import layer_in
from upcycle.checkpoint.reader import Checkpoint
from upcycle.families.extra_attention import (
    NEXTN_KEYS,
    ExtraAttention,
    attention_of,
    block_of,
    is_of_tower,
    predicts,
    prefixes,
)

_TAIL = 3  # parts of a name that tell a projection of an attention


def left_out(
    checkpoint: Checkpoint, known: Collection[str], unknown: Iterable[str]
) -> tuple[ExtraAttention, ...]:
    """The blocks that may be left out: of multi-token prediction, or with the decoder's attention.

    Args:
        checkpoint: the source as it lies on disk.
        known: its tensors of which the target is made.
        unknown: the other ones, without buffers.

    Returns:
        A block each, whose problem says that it cannot be kept. What is in none of them has no
        explanation, such as a layer behind the last that nothing speaks of.
    """
    paths = {path for name in known for path in prefixes(name)}
    blocks: dict[str, list[str]] = {}
    for name in unknown:
        blocks.setdefault(block_of(name, paths), []).append(name)
    attention = {_tail(name): checkpoint.tensors[name].shape for name in known}
    total = 1 + max((layer_in(name)[1] for name in known), default=-1)
    becomes = f"{checkpoint.config['model_type']} changes its class, and the new one has none"
    found: list[ExtraAttention] = []
    for block, names in blocks.items():
        if is_of_tower(checkpoint.config, block):
            continue
        like_decoder = [
            name
            for name in names
            if attention_of(name) and attention.get(_tail(name)) == checkpoint.tensors[name].shape
        ]
        is_next = predicts(block, names) or (
            _is_layer(block, paths) and any(checkpoint.config.get(key) for key in NEXTN_KEYS)
        )
        if is_next or (like_decoder and not _is_layer(block, paths)):
            module = next(filter(None, map(attention_of, names)), block)
            found.append(ExtraAttention(total, module, block, is_next, becomes))
    return tuple(replace(each, layer=total + place) for place, each in enumerate(found))


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-_TAIL:])


def _is_layer(block: str, paths: Collection[str]) -> bool:
    """Whether a block is a further layer of the decoder itself."""
    above, _, number = block.rpartition(".")
    return number.isdecimal() and above in paths
