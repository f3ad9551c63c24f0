"""Which number of KV heads to convert to, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.attention import AttentionShape
from upcycle.kvcache.capacity import Deployment, Fit

# Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
# Checkpoints", section 3.3: from 1 to 8 groups the speed of MQA is nearly kept.
ENOUGH_GROUPS = 8


@dataclass(frozen=True)
class Recommendation:
    """A number of KV heads and the reason for it.

    Attributes:
        kv_heads: g; None where no choice holds a single request.
        reason: one sentence.
    """

    kv_heads: int | None
    reason: str


def recommend(
    shape: AttentionShape,
    deployment: Deployment,
    fits: Sequence[Fit],
    *,
    batch: int | None = None,
) -> Recommendation:
    """The largest number of KV heads that does what is asked for: fewer merges lose less.

    Args:
        shape: the model's attention.
        deployment: the GPUs that `fits` was counted for.
        fits: the result of `fit_requests`.
        batch: requests that must fit; without it, the rule of thumb of Ainslie et al. is used.
    """
    useful = _without_waste(shape, fits)
    smallest = useful[-1]
    if smallest.requests == 0:
        return Recommendation(None, _nothing_fits(deployment, smallest))
    if batch is None:
        return _by_rule_of_thumb(shape, deployment, useful)
    enough = [fit for fit in useful if fit.requests >= batch]
    if not enough:
        return Recommendation(
            smallest.kv_heads,
            f"no number of KV heads holds {batch:,} requests; g={smallest.kv_heads} comes "
            f"nearest with {smallest.requests:,}",
        )
    best = enough[0]
    if best.kv_heads == shape.num_key_value_heads:
        return Recommendation(
            best.kv_heads, f"the model as it is holds the {batch:,} requests asked for"
        )
    return Recommendation(
        best.kv_heads,
        f"the smallest change that holds {batch:,} requests (it holds {best.requests:,})",
    )


def _without_waste(shape: AttentionShape, fits: Sequence[Fit]) -> list[Fit]:
    """Conversions that split over the GPUs and cache less than any with more heads, largest first.

    Never empty: one head always goes to every GPU.
    """
    useful: list[Fit] = []
    for fit in fits:
        lowers = fit.kv_heads <= shape.num_key_value_heads
        saves = not useful or fit.kv_heads_per_gpu < useful[-1].kv_heads_per_gpu
        if lowers and saves and fit.splits_evenly:
            useful.append(fit)
    return useful


def _by_rule_of_thumb(
    shape: AttentionShape, deployment: Deployment, useful: Sequence[Fit]
) -> Recommendation:
    enough = [fit for fit in useful if fit.kv_heads >= ENOUGH_GROUPS]
    best = enough[-1] if enough else useful[0]
    split = deployment.gpus_per_copy
    if best.kv_heads == shape.num_key_value_heads:
        reason = (
            f"the model has no more already, and about {ENOUGH_GROUPS} keep most of the quality "
            "(Ainslie et al. 2023); ask for a batch to go lower"
        )
    elif best.kv_heads <= split:
        reason = f"each of the {split} GPUs holds one KV head; fewer would be stored twice"
    else:
        reason = (
            f"about {ENOUGH_GROUPS} keep most of the quality at nearly the speed of one "
            "(Ainslie et al. 2023)"
        )
    return Recommendation(best.kv_heads, reason)


def _nothing_fits(deployment: Deployment, smallest: Fit) -> str:
    if smallest.free_per_gpu < 0:
        return (
            f"0 requests fit: weights and reserve exceed the usable memory of each GPU by "
            f"{-smallest.free_per_gpu:,} bytes, even with g={smallest.kv_heads}"
        )
    return (
        f"0 requests of {deployment.context:,} tokens fit: even with g={smallest.kv_heads} "
        f"a copy has room for {smallest.cache_tokens // deployment.copies:,} tokens"
    )
