"""Requests of several lengths, windows and states, against a loop that admits them in turn."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvcache.published import DEEPSEEK_V2
from upcycle.attention import AttentionShape, Rope
from upcycle.errors import UpcycleError
from upcycle.kvcache.capacity import fit_requests, parse_lengths
from upcycle.kvcache.deployment import Deployment
from upcycle.kvcache.devices import device_named, devices
from upcycle.kvcache.layout import CacheLayout, cache_layout
from upcycle.kvcache.recommendation import recommend
from upcycle.kvcache.weights import Weights

SHAPE = AttentionShape(2, 4, 4, 8, 8, 32, Rope("half", 8), False, False)


@given(
    lengths=st.dictionaries(st.integers(1, 50), st.integers(1, 5), min_size=1, max_size=4),
    window=st.none() | st.integers(2, 30),
    states=st.integers(0, 200),
    memory=st.integers(1, 200_000),
    step=st.integers(1, 60),
)
def test_lengths_are_met_on_average(
    lengths: dict[int, int], window: int | None, states: int, memory: int, step: int
) -> None:
    layout = CacheLayout(SHAPE, (None, window), state_elements=states)
    deployment = Deployment(memory, 50, block=4, lengths=lengths, batched_tokens=step)
    for fit in fit_requests(layout, Weights(0), deployment):
        sizes = {}
        for length in lengths:
            blocks = -(-length // 4)
            local = blocks if window is None else -(-min(window - 1 + step, length) // 4) + 1
            token = fit.kv_heads * 16 * 2
            sizes[length] = (blocks + local) * 4 * token + states * 2
        # A whole round of requests as the weights say, again and again.
        a_round = sum(weight * sizes[length] for length, weight in lengths.items())
        average = Fraction(a_round, sum(lengths.values()))
        assert fit.requests == int(memory / average)
        assert fit.mean_request_bytes - 1 < average <= fit.mean_request_bytes


def test_one_length_is_the_same_as_the_context() -> None:
    plain, listed = (
        fit_requests(SHAPE, Weights(100), Deployment(10**6, 50, lengths=lengths), batch=3)
        for lengths in ({}, {50: 7})
    )
    assert plain == listed
    assert all(fit.requests == fit.requests_at_context for fit in plain)


def test_a_window_makes_room_for_more_requests() -> None:
    deployment = Deployment(10**7, 4096, batched_tokens=1)
    whole, windowed = (
        fit_requests(CacheLayout(SHAPE, windows), Weights(0), deployment)
        for windows in ((None, None), (None, 64))
    )
    assert windowed[0].kv_bytes_per_token == whole[0].kv_bytes_per_token
    assert windowed[0].requests / whole[0].requests == pytest.approx(2 / (1 + 80 / 4096), rel=0.05)
    assert windowed[0].decode_step_bytes == 4 * 16 * 2 * (4096 + 63)


def test_a_latent_is_stored_on_every_gpu_and_cannot_be_converted() -> None:
    layout = cache_layout(DEEPSEEK_V2)
    deployment = Deployment(141 * 10**9, 8192, gpus=8)
    fits = fit_requests(layout, Weights(472 * 10**9), deployment)
    latent = fits[0]
    assert (latent.kind, latent.kv_heads) == ("MLA", None)
    assert latent.kv_bytes_per_token == 60 * 576 * 2 * 8
    assert latent.warning == "MLA: the latent is stored on each of 8 GPUs"
    recommendation = recommend(layout, deployment, fits)
    assert recommendation.kv_heads is None
    assert "2.25 KV heads" in recommendation.reason


def test_a_table_and_a_file_of_lengths(tmp_path: Path) -> None:
    assert parse_lengths("8192:30, 512:70,512:1") == {512: 71, 8192: 30}
    trace = tmp_path / "trace.txt"
    trace.write_text("512\n8192\n512\n")
    assert parse_lengths(str(trace)) == {512: 2, 8192: 1}


@pytest.mark.parametrize("text", ["", "512", "512:0", "0:1", "-5:1", "512:1,", "a:b", "5:1.5"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(UpcycleError, match="is not a length in tokens") as caught:
        parse_lengths(text)
    assert caught.value.where == "--lengths"


def test_an_empty_file_of_lengths_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("\n")
    with pytest.raises(UpcycleError, match="is not a length in tokens"):
        parse_lengths(str(trace))


@pytest.mark.parametrize("lengths", [{51: 1}, {0: 1}, {5: 0}])
def test_lengths_beyond_the_context_are_refused(lengths: dict[int, int]) -> None:
    with pytest.raises(UpcycleError, match="cannot be"):
        Deployment(10**6, 50, lengths=lengths)


def test_devices_have_a_source_and_sane_figures() -> None:
    assert len({device.name for device in devices()}) == len(devices()) > 8
    for device in devices():
        assert "https://" in device.source
        assert 10**10 < device.memory < 10**12
        assert 10**11 < device.bandwidth < 10**13


def test_a_step_takes_the_bytes_over_the_bandwidth_of_all_gpus() -> None:
    device = device_named("h100-sxm")
    assert device.name == "H100-SXM"
    assert device.step_seconds(4 * 3_350_000_000, gpus=4) == pytest.approx(1e-3)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UpcycleError, match="unknown device 'H1000'") as caught:
        device_named("H1000")
    assert "H100-SXM" in caught.value.fix
