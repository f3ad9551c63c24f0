"""How many requests fit on a set of GPUs, for every number of KV heads a model can have.

The model is that of a paged server (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention"): what the weights and the reserve leave of the memory
is cut into blocks of tokens, and every request takes whole blocks up to its length; a layer with a
window takes those that a step of prefill needs (`CacheLayout.reserved_blocks`). Under tensor
parallelism the KV heads are split over the GPUs; with fewer heads than GPUs each GPU still holds
one, so heads are stored more than once, as is the latent of MLA.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upcycle.errors import UpcycleError
from upcycle.kvcache.cache_dtype import cache_dtype
from upcycle.kvcache.deployment import Deployment, TensorParallel, nonsense, tensor_parallel
from upcycle.kvcache.layout import AttentionKind, CacheLayout, Entry, ShapeSource, cache_layout
from upcycle.kvcache.weights import Weights
from upcycle.utf8 import shown


def parse_lengths(text: str, *, where: str = "--lengths") -> Mapping[int, int]:
    """The table that "512:70,8192:30" or a file of one length a line stands for.

    Args:
        text: tokens and weight of each length, or the name of a file.
        where: the option that it came from, for the error.

    Returns:
        The weight of each length in tokens, shortest first.

    Raises:
        UpcycleError: it is neither, or a number is below 1.
    """
    if os.path.isfile(text):  # also of a text too long for a name
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
        counts = Counter(_positive(word, where=f"{where}, {text}") for word in words)
    else:
        counts = Counter()
        for pair in text.split(","):
            length, _, weight = pair.partition(":")
            counts[_positive(length, where=where)] += _positive(weight, where=where)
    if not counts:
        raise _nonsense(text, where)
    return dict(sorted(counts.items()))


def _positive(word: str, *, where: str) -> int:
    if not word.strip().isascii() or not word.strip().isdigit() or int(word) < 1:
        raise _nonsense(word, where)
    return int(word)


def _nonsense(word: str, where: str) -> UpcycleError:
    return UpcycleError(
        f"'{shown(word)}' is not a length in tokens, or not how often it occurs",
        where=where,
        fix="give 512:70,8192:30 (tokens:weight), or a file with the length of a request a line",
    )


_STATE_BYTES = 2  # of one element of a hybrid's states, which have the dtype of the weights


@dataclass(frozen=True)
class Fit:
    """What fits with one number of KV heads.

    Attributes:
        kv_heads: g; None for MLA, which has none.
        kind: MHA, GQA, MQA or MLA.
        kv_heads_per_gpu: KV heads, or latents, that each GPU stores.
        splits_evenly: whether the heads divide over the GPUs of a copy, or the GPUs over the heads.
        stored_once: whether no GPU stores what another stores.
        kv_bytes_per_token: stored for one token in all layers on all GPUs of a copy together.
        tensor_parallel: the sizes that this number of KV heads can be served with.
        request_bytes: set aside for a request at full context on all GPUs of a copy together, in
            whole blocks; fewer than for its tokens where layers see a window alone.
        mean_request_bytes: the same for a request of the given lengths, on average.
        weight_bytes: weights of one copy on all its GPUs together.
        free_per_gpu: bytes that weights and reserve leave for the cache; negative if they overflow.
        cache_tokens: tokens of requests at full context that all copies can cache.
        concurrency: requests of the given lengths that the cache holds, with the broken part.
        requests: whole requests of the given lengths, on average where they differ.
        requests_at_context: whole requests if all run to the full context.
        decode_step_bytes: that all GPUs read for one new token of each of `batch` requests at their
            full length: the weights of every copy once, and the cache of every request.
        warning: what is wasted or counted with a caveat.
    """

    kv_heads: int | None
    kind: AttentionKind
    kv_heads_per_gpu: int
    splits_evenly: bool
    stored_once: bool
    kv_bytes_per_token: int
    tensor_parallel: TensorParallel
    request_bytes: int
    mean_request_bytes: int
    weight_bytes: int
    free_per_gpu: int
    cache_tokens: int
    concurrency: float
    requests: int
    requests_at_context: int
    decode_step_bytes: int
    warning: str | None


def fit_requests(
    source: ShapeSource, weights: Weights, deployment: Deployment, *, batch: int = 1
) -> tuple[Fit, ...]:
    """What fits with the model as it is and every other number of KV heads, most heads first.

    Args:
        source: the model, see `cache_layout`.
        weights: the model's weights.
        deployment: the GPUs and how they are used.
        batch: requests that are decoded together over all copies, for `decode_step_bytes`; it
            may be more than fit.

    Raises:
        CheckpointError: the config cannot be read.
        FamilyError: the model's attention is not supported.
        UpcycleError: the query heads do not split over the GPUs, or the batch is below 1.
    """
    layout = cache_layout(source)
    split, heads = deployment.gpus_per_copy, layout.shape.num_attention_heads
    if heads % split:
        divisors = [str(n) for n in range(1, split) if heads % n == 0]
        raise nonsense(
            "tensor_parallel",
            split,
            f"the {heads} query heads split over {', '.join(divisors)} GPUs",
        )
    if batch < 1:
        raise nonsense("batch", batch, "give 1 or more")
    return tuple(_fit(layout, entry, weights, deployment, batch) for entry in layout.entries)


def _fit(
    layout: CacheLayout, entry: Entry, weights: Weights, deployment: Deployment, batch: int
) -> Fit:
    split, copies = deployment.gpus_per_copy, deployment.copies
    per_gpu = max(1, entry.heads // split)
    heads = entry.kv_heads or layout.shape.num_key_value_heads
    weights_per_gpu = weights.bytes_per_gpu(layout.shape, heads, per_gpu, split)
    free = deployment.usable_per_gpu - weights_per_gpu
    in_layer = per_gpu * cache_dtype(deployment.kv_dtype).bytes_per_head(entry)
    states = -(-layout.state_elements * _STATE_BYTES // split)

    def in_blocks(length: int) -> int:
        """Bytes on one GPU."""
        blocks = layout.reserved_blocks(length, deployment.block, deployment.tokens_per_step)
        return blocks * deployment.block * in_layer + states

    def read(length: int) -> int:
        return layout.cached_tokens(length) * in_layer + states

    lengths = deployment.request_lengths
    total = sum(lengths.values())
    stored = sum(weight * in_blocks(length) for length, weight in lengths.items())
    longest, room = in_blocks(deployment.context), max(0, free)
    stored_weights = weights_per_gpu * split
    return Fit(
        kv_heads=entry.kv_heads,
        kind=entry.kind,
        kv_heads_per_gpu=per_gpu,
        splits_evenly=entry.heads % split == 0 or split % entry.heads == 0,
        stored_once=entry.heads % split == 0,
        kv_bytes_per_token=layout.shape.num_layers * in_layer * split,
        tensor_parallel=tensor_parallel(layout.shape.num_attention_heads, entry.kv_heads),
        request_bytes=longest * split,
        mean_request_bytes=-(-stored * split // total),
        weight_bytes=stored_weights,
        free_per_gpu=free,
        cache_tokens=room * deployment.context // longest * copies,
        concurrency=room * total / stored * copies,
        requests=room * total // stored * copies,
        requests_at_context=room // longest * copies,
        decode_step_bytes=stored_weights * copies
        + -(-batch * split * sum(weight * read(n) for n, weight in lengths.items()) // total),
        warning=_warning(entry, split),
    )


def _warning(entry: Entry, split: int) -> str | None:
    heads = entry.heads
    if heads % split == 0:
        return None
    if entry.kv_heads is None:
        return f"MLA: the latent is stored on each of {split} GPUs"
    if split % heads == 0:
        return f"g={heads}: each KV head is stored on {split // heads} GPUs"
    if heads > split:
        return f"g={heads} does not divide by {split} GPUs; counted as {heads // split} a GPU"
    return f"g={heads} does not divide {split} GPUs; counted as one head a GPU"
