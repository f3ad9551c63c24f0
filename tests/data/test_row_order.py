"""The order of rows is a pure function of seed and step, whatever the number of processes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upcycle.data.packing import batch_rows, micro_batch, order


@given(st.integers(1, 50), st.integers(0, 2**40), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    assert sorted(order(num_rows, seed, epoch).tolist()) == list(range(num_rows))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(order(30, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_batches_run_through_the_epochs(num_rows: int, batch_size: int, seed: int) -> None:
    steps = -(-3 * num_rows // batch_size)
    stream = torch.cat(
        [batch_rows(s, batch_size=batch_size, num_rows=num_rows, seed=seed) for s in range(steps)]
    )
    for epoch in range(3):
        part = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part.tolist()) == list(range(num_rows))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_processes_and_micro_batches_share_a_batch(micros: int, world: int, size: int) -> None:
    rows = torch.arange(micros * world * size)
    parts = [
        micro_batch(rows, micro=micro, micro_batch_size=size, rank=rank, world=world)
        for micro in range(micros)
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), rows)


def test_the_order_is_what_it_was() -> None:
    """A change here makes every interrupted run resume on other rows."""
    assert order(8, 0, 0).tolist() == [7, 4, 3, 2, 6, 0, 5, 1]
    assert batch_rows(1, batch_size=3, num_rows=8, seed=1).tolist() == [0, 7, 5]
