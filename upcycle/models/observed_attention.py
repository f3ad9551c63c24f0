"""Attention that shows its queries, keys, values and probabilities to whoever watches."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from upcycle.errors import FamilyError
from upcycle.models.causal_blocks import causal_attention, is_causal, runs_in_bf16_on_cpu

OBSERVED = "upcycle_observed"
# Passed along by transformers' models; what a sliding window hides, the mask hides.
_WITHOUT_EFFECT = {"position_ids", "sliding_window", "use_cache", "is_causal", "output_attentions"}


@dataclass(frozen=True)
class AttentionScores:
    """What the scores of one call are made from. Query head h reads key head h // (H / K).

    Attributes:
        query: [B, H, T, d] after norms and rotation.
        key: [B, K, T, d], the same.
        value: [B, K, T, e].
        mask: additive, [B or 1, 1, T, T].
        scaling: factor of the scores.
        softcap: bound of the scores by softcap * tanh(scores / softcap), or None.
        sinks: [H] logits that join the softmax and attend to nothing, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.query.shape[1] // self.key.shape[1]

    def row(self, index: int) -> "AttentionScores":
        """The scores of one row, as a batch of one."""
        one = slice(index, index + 1)
        mask = self.mask if len(self.mask) == 1 else self.mask[one]
        return replace(
            self, query=self.query[one], key=self.key[one], value=self.value[one], mask=mask
        )

    def probabilities(self, head: int) -> Tensor:
        """[B, T, T]: how much each position of query head `head` attends to each position."""
        key = self.key[:, head // self.group]
        scores = (self.query[:, head] * self.scaling) @ key.transpose(1, 2)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + self.mask[:, 0]
        if self.sinks is not None:
            sink = self.sinks[head].to(scores.dtype).expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, sink), -1)
        exact = torch.promote_types(scores.dtype, torch.float32)
        return scores.softmax(-1, dtype=exact)[..., : key.shape[1]].to(scores.dtype)

    def attended(self, head: int) -> Tensor:
        """[B, T, e]: the values under a query head's attention."""
        return self.probabilities(head) @ self.value[:, head // self.group]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention.

    Attributes:
        inputs: [B, T, D] what q, k and v are projected from.
        output: [B, T, D] after the output projection.
        scores: what the scores were made from; None for a class that does not say (Falcon).
        arguments: what the layer passed beside the inputs.
        keywords: the same, by name.
    """

    inputs: Tensor
    output: Tensor
    scores: AttentionScores | None
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


Observer = Callable[[AttentionCall], None]


@contextmanager
def observed(attention: nn.Module, observer: Observer) -> Iterator[None]:
    """Tell the observer every call of an attention module while the context lasts."""
    scores: list[AttentionScores] = []

    def after(
        _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        keywords = dict(keywords)
        inputs, *others = arguments or (keywords.pop("hidden_states"),)
        shown = scores.pop() if scores else None
        observer(AttentionCall(inputs, first_of(output), shown, tuple(others), keywords))

    hook = attention.register_forward_hook(after, with_kwargs=True)
    attention.__dict__[OBSERVED] = scores
    try:
        yield
    finally:
        del attention.__dict__[OBSERVED]
        hook.remove()


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [B, H, T, d].
        key: [B, K, T, d].
        value: [B, K, T, e].
        attention_mask: additive, [B or 1, 1, T, T].
        scaling: factor of the scores; 1 / sqrt(d) where None.
        dropout: must be 0: this is for inference.
        softcap: see `AttentionScores`.
        s_aux: the sinks, see `AttentionScores`.
        others: what the model passes beside; only arguments without effect are accepted.

    Returns:
        [B, T, H, e], and no attention weights.

    Raises:
        FamilyError: the model's attention has a feature that is not expressed here.
    """
    unknown = [k for k, v in others.items() if v is not None and k not in _WITHOUT_EFFECT]
    if dropout or unknown or attention_mask is None:
        raise FamilyError(
            f"the attention of this model uses {', '.join(unknown) or 'dropout or no mask'}",
            where=type(module).__name__,
            fix="convert it without calibration",
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    scores = AttentionScores(query, key, value, attention_mask, factor, softcap, s_aux)
    if OBSERVED in module.__dict__:
        module.__dict__[OBSERVED].append(scores)
    plain = softcap is None and s_aux is None
    if plain and runs_in_bf16_on_cpu(query) and is_causal(attention_mask):
        attended = causal_attention(query, key, value, factor)
        return attended.transpose(1, 2).contiguous(), None
    if plain:
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=factor, enable_gqa=scores.group > 1
        )
        return attended.transpose(1, 2).contiguous(), None
    heads = [scores.attended(head) for head in range(query.shape[1])]
    return torch.stack(heads, 2), None


def register_observed_attention() -> None:
    """Make `OBSERVED` an attention implementation of transformers, with the eager mask beside it.

    Without a registered mask function transformers would pass no mask at all.
    """
    AttentionInterface.register(OBSERVED, observed_attention)
    AttentionMaskInterface.register(OBSERVED, eager_mask)


def first_of(output: Any) -> Tensor:
    """The hidden states [B, T, D] of what a layer or an attention returns, alone or with others."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
