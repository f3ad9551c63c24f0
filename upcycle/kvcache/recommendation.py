"""Which number of KV heads to convert to, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.kvcache.capacity import Fit
from upcycle.kvcache.deployment import Deployment
from upcycle.kvcache.layout import CacheLayout, ShapeSource, cache_layout

# Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
# Checkpoints", section 3.3: from 1 to 8 groups the speed of MQA is nearly kept.
ENOUGH_GROUPS = 8
_MOST_QUALITY = (
    f"{ENOUGH_GROUPS} keep most of the quality at nearly the speed of one (Ainslie et al. 2023)"
)
_GO_LOWER = "ask for a batch to go lower"


@dataclass(frozen=True)
class Recommendation:
    """A number of KV heads and the reason for it.

    Attributes:
        kv_heads: g; None where no choice holds a single request, or the model has none.
        reason: one sentence.
    """

    kv_heads: int | None
    reason: str


def recommend(
    source: ShapeSource,
    deployment: Deployment,
    fits: Sequence[Fit],
    *,
    batch: int | None = None,
) -> Recommendation:
    """The largest number of KV heads that does what is asked for: fewer merges lose less.

    Args:
        source: the model, see `cache_layout`.
        deployment: the GPUs that `fits` was counted for.
        fits: the result of `fit_requests`.
        batch: requests that must fit; without it, the rule of thumb of Ainslie et al. is used.
    """
    layout = cache_layout(source)
    now = layout.now.kv_heads
    useful = _without_waste(layout, fits)
    smallest = useful[-1]
    if smallest.requests == 0:
        return Recommendation(None, _nothing_fits(deployment, smallest))
    unmerged = _latent(layout) if now is None else nothing_to_merge(layout.shape)
    if unmerged is not None:
        return Recommendation(now, unmerged + _held(smallest, batch))
    if batch is None:
        return _by_rule_of_thumb(now or 1, deployment, useful)
    enough = [fit for fit in useful if fit.requests >= batch]
    if not enough:
        return Recommendation(
            smallest.kv_heads,
            f"no number of KV heads holds {batch:,} requests; g={smallest.kv_heads} comes "
            f"nearest with {smallest.requests:,}",
        )
    best = enough[0]
    if best.kv_heads == now:
        return Recommendation(
            best.kv_heads, f"the model as it is holds the {batch:,} requests asked for"
        )
    return Recommendation(
        best.kv_heads,
        f"the smallest change that holds {batch:,} requests (it holds {best.requests:,})",
    )


def _without_waste(layout: CacheLayout, fits: Sequence[Fit]) -> list[Fit]:
    """Conversions that split over the GPUs and cache less than any with more heads, largest first.

    Never empty: one head always goes to every GPU, and a latent is the only choice.
    """
    if layout.latent is not None:
        return [fit for fit in fits if fit.kv_heads is None]
    useful: list[Fit] = []
    for fit in fits:
        lowers = (fit.kv_heads or 0) <= layout.shape.num_key_value_heads
        saves = not useful or fit.kv_heads_per_gpu < useful[-1].kv_heads_per_gpu
        if lowers and saves and fit.splits_evenly:
            useful.append(fit)
    return useful


def _by_rule_of_thumb(now: int, deployment: Deployment, useful: Sequence[Fit]) -> Recommendation:
    enough = [fit for fit in useful if (fit.kv_heads or 0) >= ENOUGH_GROUPS]
    best = enough[-1] if enough else useful[0]
    lower = useful[useful.index(best) + 1 :]
    split = deployment.gpus_per_copy
    if useful[0] is best and best.kv_heads != now:
        reason = (
            f"the model's {now} do not split over {split} GPUs, and no larger number below does"
        )
    elif best.kv_heads_per_gpu == 1:
        reason = f"each of the {split} GPUs holds one KV head; fewer save nothing more"
    elif best.kv_heads != now:
        reason = f"about {_MOST_QUALITY}"
    elif now <= ENOUGH_GROUPS:
        reason = f"the model has no more already, and about {_MOST_QUALITY}; {_GO_LOWER}"
    else:
        next_lower = lower[0].kv_heads
        reason = f"the next lower number is {next_lower}, and about {_MOST_QUALITY}; {_GO_LOWER}"
    return Recommendation(best.kv_heads, reason)


def nothing_to_merge(shape: AttentionShape) -> str | None:
    """Why a model cannot have fewer KV heads, as a sentence; None where it can."""
    if shape.num_key_value_heads > 1:
        return None
    single = "one query head, " if shape.num_attention_heads == 1 else ""
    return f"{single}already multi-query: nothing to merge"


def _held(fit: Fit, batch: int | None) -> str:
    if batch is None:
        return ""
    if fit.requests >= batch:
        return f"; it holds the {batch:,} requests asked for"
    return f"; it holds {fit.requests:,} of the {batch:,} requests asked for"


def _latent(layout: CacheLayout) -> str:
    assert layout.latent is not None
    shape, latent = layout.shape, layout.latent
    return (
        f"the model as it is: its latent takes as much as {latent.kv_heads(shape):.3g} KV heads of "
        f"{shape.head_dim} + {shape.value_head_dim} channels, as its heads have "
        f"({latent.groups(shape):.3g} KV heads without the {latent.rope_dim} rotary channels, as "
        "DeepSeek-V2's paper counts), and no conversion leads from it to KV heads"
    )


def _nothing_fits(deployment: Deployment, smallest: Fit) -> str:
    name = smallest.kind if smallest.kv_heads is None else f"g={smallest.kv_heads}"
    if smallest.free_per_gpu < 0:
        return (
            f"0 requests fit: weights and reserve exceed the usable memory of each GPU by "
            f"{-smallest.free_per_gpu:,} bytes, even with {name}"
        )
    return (
        f"0 requests of {deployment.context:,} tokens fit: even with {name} a copy has room for "
        f"{smallest.cache_tokens // deployment.copies:,} tokens"
    )
