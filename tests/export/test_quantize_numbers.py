"""Palettes and integers against plain arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from upcycle.errors import ExportError
from upcycle.export.quantize.dequantise import dequantise
from upcycle.export.quantize.palette import fit_palette
from upcycle.export.quantize.schemes import Scheme


def gaussian(*shape: int, seed: int = 0) -> NDArray[np.float16]:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float16)


def squared_error(weights: NDArray[np.float16], table: NDArray[np.float16]) -> float:
    """Of every weight to the nearest entry, the long way."""
    distances = weights.ravel()[:, None].astype(np.float64) - table[None].astype(np.float64)
    return float((distances**2).min(1).sum())


@pytest.mark.parametrize("bits", [4, 6])
def test_a_palette_is_as_good_as_k_means_over_all_weights(bits: int) -> None:
    weights = gaussian(64, 64)
    table, _ = fit_palette(weights, bits)
    data = weights.reshape(-1, 1).astype(np.float64)
    best = KMeans(2**bits, n_init=3, random_state=0).fit(data).inertia_
    assert squared_error(weights, table) < 1.05 * best


@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=200), st.sampled_from([2, 4]))
def test_every_weight_takes_the_nearest_entry(values: list[float], bits: int) -> None:
    weights = np.array(values, np.float16)
    table, indices = fit_palette(weights, bits)
    assert table.shape == (2**bits,)
    assert (np.diff(table.astype(np.float64)) >= 0).all()
    chosen = np.abs(table[indices].astype(np.float64) - weights)
    nearest = np.abs(table[None].astype(np.float64) - weights[:, None]).min(1)
    assert np.array_equal(chosen, nearest)


@given(st.sets(st.floats(-100, 100, width=16), min_size=1, max_size=16), st.integers(0, 9))
def test_few_different_weights_are_kept_exactly(values: set[float], seed: int) -> None:
    weights = np.random.default_rng(seed).choice(np.array([*values], np.float16), 100)
    table, indices = fit_palette(weights, 4)
    assert np.array_equal(table[indices], weights)


def test_each_group_of_channels_has_its_own_palette() -> None:
    weight = torch.from_numpy(gaussian(8, 32)) * torch.tensor([1.0] * 4 + [100.0] * 4)[:, None]
    found = dequantise(weight, Scheme(kind="palette", bits=4, group=4))
    alone = torch.cat(
        [dequantise(part, Scheme(kind="palette", bits=4)) for part in weight.split(4)]
    )
    assert torch.equal(found, alone)
    assert all(len(part.unique()) <= 16 for part in found.split(4))
    assert len(found.unique()) > 16


def test_each_expert_has_its_own_palette() -> None:
    experts = torch.from_numpy(gaussian(3, 16, 32))
    found = dequantise(experts, Scheme(kind="palette", bits=4, group=16))
    each = [dequantise(expert, Scheme(kind="palette", bits=4)) for expert in experts]
    assert torch.equal(found, torch.stack(each))


@pytest.mark.parametrize(("bits", "block"), [(8, None), (4, None), (4, 8), (8, 16)])
def test_integers_have_one_symmetric_scale_per_channel_or_block(
    bits: int, block: int | None
) -> None:
    weight = gaussian(6, 32)
    found = dequantise(torch.from_numpy(weight), Scheme(kind="linear", bits=bits, block=block))
    size = block or 32
    largest = 2 ** (bits - 1) - 1
    for row in range(6):
        for start in range(0, 32, size):
            part = weight[row, start : start + size]
            scale = np.float16(np.float16(2 * np.abs(part).max()) / np.float16(2 * largest))
            integers = [round(float(np.float16(value / scale))) for value in part]
            assert max(map(abs, integers)) == largest
            expected = [np.float16(np.float64(scale) * integer) for integer in integers]
            assert found[row, start : start + size].tolist() == expected


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = torch.from_numpy(gaussian(4, 32))
    weight[1] = 0
    found = dequantise(weight, Scheme(kind="linear", bits=8))
    assert found[1].eq(0).all()
    assert found.isfinite().all()


def test_weights_beyond_fp16_are_refused() -> None:
    with pytest.raises(ExportError, match="not finite in fp16"):
        dequantise(torch.full((16, 16), 1e5), Scheme(kind="linear", bits=8))
