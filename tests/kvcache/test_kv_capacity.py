"""Capacity against a slow reference that hands out blocks one by one."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from upcycle.attention import AttentionShape, Rope
from upcycle.errors import UpcycleError
from upcycle.kvcache.capacity import Fit, fit_requests
from upcycle.kvcache.deployment import Deployment
from upcycle.kvcache.recommendation import recommend
from upcycle.kvcache.weights import Weights

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}


@st.composite
def shapes(draw: Callable[..., int]) -> AttentionShape:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return AttentionShape(
        num_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        value_head_dim=draw(st.integers(1, 9)),
        hidden_size=draw(st.integers(1, 16)),
        rope=Rope("none", 0),
        qkv_bias=draw(st.booleans()),
        output_bias=False,
    )


def reference_token_bytes(shape: AttentionShape, heads: int, kv_dtype: str) -> int:
    total = 0
    for _layer in range(shape.num_layers):
        for _head in range(heads):
            for width in (shape.head_dim, shape.value_head_dim):
                bits = sum(BITS[kv_dtype] for _channel in range(width))
                total += (bits + 7) // 8
                total += 4 if kv_dtype.startswith("int") else 0
    return total


def reference_kv_weights(shape: AttentionShape, heads: int) -> int:
    total = 0
    for _layer in range(shape.num_layers):
        for _head in range(heads):
            for width in (shape.head_dim, shape.value_head_dim):
                total += width * shape.hidden_size + (width if shape.qkv_bias else 0)
    return total


def reference_requests(free: int, block_bytes: int, context: int, block: int) -> int:
    """Admit requests while there are blocks for all their tokens."""
    requests = 0
    while True:
        tokens = 0
        while tokens < context:
            free -= block_bytes
            tokens += block
            if free < 0:
                return requests
        requests += 1


@given(
    shape=shapes(),
    gpus=st.sampled_from([1, 2, 4, 6]),
    copies=st.sampled_from([1, 2, 3]),
    memory=st.integers(1, 60_000),
    spare_weights=st.integers(0, 20_000),
    context=st.integers(1, 70),
    block=st.integers(1, 20),
    reserve=st.integers(0, 2_000),
    kv_dtype=st.sampled_from(sorted(BITS)),
    batch=st.integers(1, 5),
)
def test_requests_are_those_of_handing_out_blocks_one_by_one(
    shape: AttentionShape,
    gpus: int,
    copies: int,
    memory: int,
    spare_weights: int,
    context: int,
    block: int,
    reserve: int,
    kv_dtype: str,
    batch: int,
) -> None:
    split = gpus // copies
    assume(gpus % copies == 0 and shape.num_attention_heads % split == 0)
    deployment = Deployment(
        memory, context, gpus, split, kv_dtype=kv_dtype, block=block, reserve=reserve
    )
    now = reference_kv_weights(shape, shape.num_key_value_heads) * 2 + spare_weights
    for fit in fit_requests(shape, Weights(now, 2), deployment, batch=batch):
        on_gpu = 1 if fit.kv_heads < split else fit.kv_heads // split
        per_token = reference_token_bytes(shape, on_gpu, kv_dtype)
        weights = (spare_weights + split - 1) // split + 2 * reference_kv_weights(shape, on_gpu)
        free = memory - weights - (reserve + gpus - 1) // gpus
        expected = reference_requests(free, per_token * block, context, block)
        assert fit.free_per_gpu == free
        assert fit.requests == expected * copies
        assert int(fit.concurrency / copies + 1e-9) == expected
        assert fit.kv_bytes_per_token == per_token * split
        assert fit.decode_step_bytes == gpus * weights + batch * context * per_token * split


def shape_with(heads: int, kv_heads: int) -> AttentionShape:
    return AttentionShape(2, heads, kv_heads, 64, 64, 256, Rope("half", 64), False, False)


def fits_of(shape: AttentionShape, deployment: Deployment) -> dict[int, Fit]:
    return {fit.kv_heads: fit for fit in fit_requests(shape, Weights(10**6, 2), deployment)}


def recommended(
    shape: AttentionShape, deployment: Deployment, batch: int | None = None
) -> int | None:
    fits = fit_requests(shape, Weights(10**6, 2), deployment)
    return recommend(shape, deployment, fits, batch=batch).kv_heads


def test_heads_that_do_not_divide_are_floored_with_a_warning() -> None:
    fit = fits_of(shape_with(12, 6), Deployment(10**9, 64, gpus=4))[6]
    assert fit.kv_heads_per_gpu == 1
    assert not fit.splits_evenly
    assert fit.warning == "g=6 does not divide by 4 GPUs; counted as 1 a GPU"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "gpus", "expected"),
    [
        (32, 32, 1, 8),  # about eight groups are enough
        (32, 32, 16, 16),  # fewer than one head a GPU saves nothing
        (64, 8, 4, 8),  # no more than eight already
        (12, 12, 1, 12),  # the next lower, six, would be fewer than eight
        (4, 2, 4, 2),  # one head would take as much room as two
        (12, 6, 4, 2),  # six and three heads do not split over four GPUs
    ],
)
def test_recommendation_without_a_target(
    heads: int, kv_heads: int, gpus: int, expected: int
) -> None:
    assert recommended(shape_with(heads, kv_heads), Deployment(10**9, 64, gpus=gpus)) == expected


def test_recommendation_is_the_least_change_that_holds_the_batch() -> None:
    shape, deployment = shape_with(32, 32), Deployment(50 * 10**6, 1024)
    fits = fits_of(shape, deployment)
    assert fits[32].requests < fits[16].requests < fits[8].requests
    assert recommended(shape, deployment, batch=fits[32].requests) == 32
    assert recommended(shape, deployment, batch=fits[32].requests + 1) == 16
    assert recommended(shape, deployment, batch=fits[16].requests + 1) == 8
    assert recommended(shape, deployment, batch=10**9) == 1


def test_weights_larger_than_memory_fit_nothing_and_say_so() -> None:
    shape, deployment = shape_with(32, 32), Deployment(10**6, 64)
    fits = fit_requests(shape, Weights(10**9, 2), deployment)
    assert {fit.requests for fit in fits} == {0}
    recommendation = recommend(shape, deployment, fits)
    assert recommendation.kv_heads is None
    assert recommendation.reason.startswith("0 requests fit: weights and reserve exceed")


def test_a_context_too_long_for_the_memory_names_the_room() -> None:
    shape, deployment = shape_with(2, 2), Deployment(2 * 10**6, 10**6)
    fits = fit_requests(shape, Weights(10**6, 2), deployment)
    reason = recommend(shape, deployment, fits).reason
    assert reason.startswith("0 requests of 1,000,000 tokens fit")
    assert f"{fits[-1].cache_tokens:,} tokens" in reason


@pytest.mark.parametrize(
    "nonsense",
    [
        {"gpus": 0},
        {"gpus": -1},
        {"gpu_memory": 0},
        {"context": -1},
        {"context": 0},
        {"block": 0},
        {"reserve": -1},
        {"utilization": 0.0},
        {"utilization": 1.5},
        {"utilization": float("nan")},
        {"gpus": 4, "tensor_parallel": 3},
        {"tensor_parallel": 0},
        {"kv_dtype": "int3"},
    ],
    ids=str,
)
def test_nonsense_is_refused(nonsense: dict[str, float | str]) -> None:
    sound = {"gpu_memory": 10**9, "context": 64}
    with pytest.raises(UpcycleError):
        Deployment(**(sound | nonsense))


def test_query_heads_must_split_over_the_gpus() -> None:
    with pytest.raises(UpcycleError, match="tensor_parallel cannot be 3") as caught:
        fits_of(shape_with(8, 8), Deployment(10**9, 64, gpus=3))
    assert caught.value.fix == "the 8 query heads split over 1, 2 GPUs"
