"""What a model caches: how many tokens in each layer, and what one token leaves there."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from upcycle.attention import AttentionShape
from upcycle.checkpoint.files import read_json_object
from upcycle.checkpoint.reader import read_config, resolve_config
from upcycle.families import caches_latent, family_of
from upcycle.families.latent import Latent, latent_attention
from upcycle.families.retargets.rules import target_config
from upcycle.planning import check_kv_heads

AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]


@dataclass(frozen=True)
class Entry:
    """What one token leaves in one layer, with one kind of attention.

    Attributes:
        kind: MHA, GQA, MQA or MLA.
        kv_heads: g; None for MLA, which has none.
        heads: how often both vectors are stored: g, or 1 for MLA.
        key_width: channels of the key, or of the latent.
        value_width: channels of the value, or of the rotated key beside the latent.
    """

    kind: AttentionKind
    kv_heads: int | None
    heads: int
    key_width: int
    value_width: int

    @property
    def elements(self) -> int:
        """Numbers that one token leaves in one layer."""
        return self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class CacheLayout:
    """A model as far as its cache is concerned.

    Attributes:
        shape: its attention.
        windows: for each layer with attention the tokens that a query sees, itself among them;
            None for no limit.
        latent: of multi-head latent attention.
        state_elements: what other layers keep for each sequence, however long.
        chunked: whether the windows are aligned chunks, which do not slide.
    """

    shape: AttentionShape
    windows: tuple[int | None, ...]
    latent: Latent | None = None
    state_elements: int = 0
    chunked: bool = False

    @cached_property
    def layers_by_window(self) -> Mapping[int | None, int]:
        """How many layers have each window."""
        return Counter(self.windows)

    @property
    def now(self) -> Entry:
        """The model as it is."""
        return self.entry(None)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The model as it is and with every other number of KV heads, most heads first."""
        latent = () if self.latent is None else (self.now,)
        return latent + tuple(self.entry(g) for g in reversed(self.shape.valid_kv_heads))

    def entry(self, kv_heads: int | None) -> Entry:
        """One choice; None stands for the model as it is.

        Raises:
            PlanError: the model cannot have that many KV heads.
        """
        shape = self.shape
        if kv_heads is None and self.latent is not None:
            return Entry("MLA", None, 1, self.latent.rank, self.latent.rope_dim)
        heads = shape.num_key_value_heads if kv_heads is None else kv_heads
        check_kv_heads(shape, heads, where=f"kv_heads={heads}")
        kind = attention_kind(shape, heads)
        return Entry(kind, heads, heads, shape.head_dim, shape.value_head_dim)

    def cached_tokens(self, length: int) -> int:
        """Tokens in the caches of all layers together after `length` tokens.

        A layer with a window w keeps the w - 1 latest, as transformers' cache does: with the next
        token they are the window.
        """
        return sum(
            layers * (length if window is None else min(length, window - 1))
            for window, layers in self.layers_by_window.items()
        )

    def attended_keys(self, length: int) -> int:
        """Keys that the token at position `length` (from 1 on) meets in all layers together."""
        return sum(
            layers * (length if window is None else min(length, window))
            for window, layers in self.layers_by_window.items()
        )

    def causal_pairs(self, length: int) -> int:
        """Pairs of query and key in a prefill of `length` tokens that the masks let through."""
        total = 0
        for window, layers in self.layers_by_window.items():
            grows = length if window is None else min(length, window)
            total += layers * (grows * (grows + 1) // 2 + (length - grows) * grows)
        return total

    def reserved_blocks(self, length: int, block: int, batched_tokens: int) -> int:
        """Blocks of `block` tokens in all layers together that a server sets aside for a request.

        In a step of prefill a layer with a window w holds the w - 1 latest tokens beside those that
        the step computes. A sliding window may begin inside a block, which takes one more; chunks
        begin with one. These are the blocks by which vLLM admits a request
        (`max_admission_blocks_per_request` in its v1/kv_cache_interface.py).

        Args:
            length: tokens that the request may grow to.
            block: tokens of one block.
            batched_tokens: tokens that the server computes in one step.
        """

        def blocks(window: int | None) -> int:
            if window is None:
                return -(-length // block)
            kept = window if self.chunked else window - 1
            return -(-min(kept + batched_tokens, length) // block) + (not self.chunked)

        return sum(layers * blocks(window) for window, layers in self.layers_by_window.items())


ShapeSource = CacheLayout | AttentionShape | Mapping[str, Any] | str | Path


def cache_layout(source: ShapeSource) -> CacheLayout:
    """What a model caches.

    Args:
        source: a checkpoint folder, a Hub id, a `config.json`, the parsed config, or an
            `AttentionShape`, whose layers are taken to see the whole context.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
    """
    if isinstance(source, CacheLayout):
        return source
    if isinstance(source, AttentionShape):
        return CacheLayout(source, (None,) * source.num_layers)
    config = source if isinstance(source, Mapping) else config_of(source)
    if caches_latent(config):
        shape, latent = latent_attention(config)
        return CacheLayout(shape, (None,) * shape.num_layers, latent)
    target = target_config(config)
    family = family_of(target)
    shape = family.shape(target)
    return CacheLayout(
        shape,
        family.attention_windows(target, shape.attention_layers),
        state_elements=family.state_elements(target, shape.num_layers),
        chunked=family.windows is not None and family.windows.chunked,
    )


def config_of(source: str | Path) -> Mapping[str, Any]:
    """The parsed config of a folder, a Hub id or a bare `config.json`; no weights are needed.

    Raises:
        CheckpointError: the config cannot be read.
    """
    path = Path(source)
    return read_json_object(path)[1] if path.is_file() else read_config(resolve_config(source))[1]


def attention_kind(shape: AttentionShape, kv_heads: int) -> AttentionKind:
    """The name of attention with that many KV heads."""
    if kv_heads == shape.num_attention_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"
