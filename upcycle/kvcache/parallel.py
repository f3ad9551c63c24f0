"""Over how many GPUs a number of KV heads can be served, as servers split attention."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorParallel:
    """The sizes of tensor parallelism that attention can be served with, ascending.

    vLLM wants the query heads to divide by the size, and the KV heads by the size or the size by
    them (`ModelConfig.verify_with_parallel_config` and the assertions of its attention layers).

    Attributes:
        stored_once: sizes with which no GPU stores what another stores.
        copied: sizes with which several GPUs store the same KV heads.
    """

    stored_once: tuple[int, ...]
    copied: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted((*self.stored_once, *self.copied)))

    def __str__(self) -> str:
        """The sizes for people: "1, 2, 4; 8 and 16 with copies"."""
        once = _listed(self.stored_once)
        return f"{once} ({_listed(self.copied)} with copies)" if self.copied else once


def tensor_parallel(num_attention_heads: int, kv_heads: int | None) -> TensorParallel:
    """The sizes for H query heads and g KV heads; None stands for a latent, which has none."""
    sizes = [n for n in range(1, num_attention_heads + 1) if num_attention_heads % n == 0]
    stored = kv_heads or 1
    return TensorParallel(
        stored_once=tuple(n for n in sizes if stored % n == 0),
        copied=tuple(n for n in sizes if stored % n and n % stored == 0),
    )


def serving_line(num_attention_heads: int, kv_heads: int) -> str:
    """What a number of KV heads means for serving on several GPUs, as a sentence."""
    found = tensor_parallel(num_attention_heads, kv_heads)
    line = f"serves with tensor parallel {_listed(found.stored_once)}"
    if not found.copied:
        return line
    return f"{line}; with {_listed(found.copied)} GPUs hold copies of the same KV heads"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
