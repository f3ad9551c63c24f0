"""What `check-export` lets pass, on logits that are made up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from upcycle.parity.logits import compare_logits, shaky_positions
from upcycle.parity.results import LIMITS, TYPICAL, Arithmetic, rules

POSITIONS, VOCABULARY = 20, 50


def some_logits(seed: int = 0) -> Tensor:
    """[20, 50] with a range of exactly 10."""
    logits = torch.rand(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 8
    logits[0, 0], logits[0, 1] = -1.0, 9.0
    return logits


def moved(logits: Tensor, position: int, by: float) -> Tensor:
    other = logits.clone()
    other[position, 3] += by
    return other


def failed(other: Tensor, rounded: Tensor, *, exact: bool = False) -> set[str]:
    own = some_logits()
    excused = None if exact else shaky_positions(own, [own, rounded], LIMITS[exact])
    difference = compare_logits(own, other, excused)
    found = Arithmetic(
        name="any", exact=exact, text=difference, end=difference, prefill=None, caches=None,
        full=difference, against=None, largest=[], overflowed=[],
    )  # fmt: skip
    return {check.name.split(": ")[1] for check in rules(found, None) if not check.passed}


def test_one_position_that_is_off_fails() -> None:
    own = some_logits()
    assert failed(moved(own, 4, 0.04), own, exact=True) == set()
    assert failed(moved(own, 4, 0.06), own, exact=True) == {
        "logits", "end of context", "checkpoint's numbers",
    }  # fmt: skip
    assert failed(moved(own, 4, 0.4), own) == set()
    assert failed(moved(own, 4, 0.6), own) == {"logits", "end of context"}


def test_a_position_that_rounding_alone_moves_is_excused() -> None:
    own = some_logits()
    far = moved(own, 4, 5.0)
    assert failed(far, moved(own, 4, 0.24)) == {"logits", "end of context"}
    assert failed(far, moved(own, 4, 0.26)) == set()
    assert failed(moved(far, 5, 0.6), moved(own, 4, 0.26)) == {"logits", "end of context"}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_overflows_in_torch_excuses_nothing(value: float) -> None:
    own = some_logits()
    rounded = own.clone()
    rounded[4, 3] = value
    assert not shaky_positions(own, [rounded], LIMITS[False]).any()
    assert "logits" in failed(rounded, rounded)


def test_excuses_for_all_positions_are_none() -> None:
    """Where torch is off everywhere nothing is known, and nothing passes."""
    own = some_logits()
    assert "logits" in failed(own, own + torch.linspace(0, 3, VOCABULARY))


def test_many_positions_a_little_off_fail() -> None:
    own = some_logits()
    other = own.clone()
    other[: POSITIONS // 2 + 1, 3] += 0.3
    assert TYPICAL < 0.03
    assert failed(other, own) == {"logits, typical", "end of context, typical"}


@given(st.integers(0, 2**31), st.floats(0, 3), st.floats(0, 1))
def test_more_excuses_never_raise_the_maximum(seed: int, noise: float, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = some_logits(seed)
    other = own + noise * torch.randn(own.shape, generator=generator)
    excused = torch.rand(POSITIONS, generator=generator) < share
    every, some = compare_logits(own, other), compare_logits(own, other, excused)
    assert some.excused == int(excused.sum())
    assert every.excused == 0
    assert (some.typical, some.mean, some.kl, some.agreeing) == (
        every.typical, every.mean, every.kl, every.agreeing,
    )  # fmt: skip
    if some.excused < POSITIONS:
        apart = (other - own).double().abs().amax(-1)[~excused]
        assert some.maximum == pytest.approx(float(apart.max()), rel=1e-5)
        assert some.maximum <= every.maximum
    else:
        assert some.maximum == math.inf
