"""What moments of copied heads can hold, against exact moments of heads made from a few rows."""

import pytest
import torch
from torch import Tensor

from upcycle.heads.blocks import clean_groups, within_copies

HEADS, WIDTH, HIDDEN = 4, 6, 40


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copies(rank: int = WIDTH) -> Tensor:
    """[n, m, D] heads that are random maps of the same few rows."""
    return noise(HEADS, WIDTH, rank, seed=1) @ noise(rank, HIDDEN, seed=2)


def moment_of(rows: Tensor, tokens: int) -> Tensor:
    x = rows.flatten(0, 1) @ noise(HIDDEN, tokens, seed=3)
    return x @ x.mT / tokens


def rounded(moment: Tensor) -> Tensor:
    size = 1e-7 * moment.abs().max()
    off = noise(*moment.shape, seed=4) * size
    return moment + (off + off.mT) / 2


@pytest.mark.parametrize("rank", [1, 3, WIDTH])
@pytest.mark.parametrize("tokens", [2, 5, 100])
def test_rounding_outside_of_what_the_heads_span_is_gone(rank: int, tokens: int) -> None:
    rows = copies(rank)
    exact = moment_of(rows, tokens)
    found = within_copies(rounded(exact), rows)
    levels = torch.linalg.eigvalsh(found).abs().sort(descending=True).values
    assert levels[rank:].max() <= 1e-14 * levels[0]
    # Nothing of the moment itself is lost.
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6 * float(exact.abs().max()))
    torch.testing.assert_close(
        within_copies(exact, rows), exact, rtol=0, atol=1e-12 * float(exact.abs().max())
    )


def test_maps_that_were_stored_in_fp32_are_found() -> None:
    rows = copies().float().double()
    found = within_copies(rounded(moment_of(rows, 5)), rows)
    assert torch.linalg.matrix_rank(found, rtol=1e-12) <= WIDTH


def test_equal_heads_share_every_bit_of_what_is_left() -> None:
    rows = noise(1, WIDTH, HIDDEN, seed=5).expand(HEADS, -1, -1)
    found = within_copies(rounded(moment_of(rows, 3)), rows)
    blocks = found.unflatten(0, (HEADS, WIDTH)).unflatten(2, (HEADS, WIDTH))
    difference = blocks - blocks[:1, :, :1]
    assert difference.abs().max() <= 1e-14 * found.abs().max()


def test_other_heads_are_left_alone() -> None:
    rows = copies()
    rows[2, 3] += 1e-3 * noise(HIDDEN, seed=6)
    moment = rounded(moment_of(rows, 5))
    assert within_copies(moment, rows) is moment


def test_a_constant_is_a_column_of_its_own() -> None:
    rows = torch.cat((copies(), noise(HEADS, WIDTH, 1, seed=7)), -1)
    moment = rounded(moment_of(copies(), 5))
    assert within_copies(moment, rows) is moment, "the constants are no copies"


def test_pruned_heads_stay_zero() -> None:
    rows = copies()
    rows[0] = 0
    moment = rounded(moment_of(rows, 5))
    found = within_copies(moment, rows)
    assert found[:WIDTH].abs().max() <= 1e-14 * moment.abs().max()
    assert within_copies(moment, torch.zeros_like(rows)).abs().max() == 0


def test_groups_are_cleaned_one_by_one() -> None:
    rows = copies()
    rows[2:] = noise(2, WIDTH, HIDDEN, seed=8)  # the second group has no copies
    moment = rounded(moment_of(rows, 5))
    expected = moment.clone()
    half = HEADS // 2 * WIDTH
    expected[:half, :half] = within_copies(moment[:half, :half], rows[:2])
    clean_groups(moment, 2, rows)
    torch.testing.assert_close(moment, expected, rtol=0, atol=0)
    assert torch.linalg.matrix_rank(moment[:half, :half], rtol=1e-12) == WIDTH
