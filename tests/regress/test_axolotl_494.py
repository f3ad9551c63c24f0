"""Packed training hangs with an unequal number of rows per rank (axolotl-ai-cloud/axolotl#494).

Also pytorch/pytorch#141069 and huggingface/accelerate#2258. Whatever the number of rows, every
process gets equally many full micro-batches at every step, and no epoch ends for one of them alone.
"""

import pytest

from upcycle.data.packing import batch_rows, micro_batch


@pytest.mark.parametrize("num_rows", [7, 9, 64])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_process_gets_full_batches(num_rows: int, world: int) -> None:
    batch_size, micro_batch_size = 8, 2
    for step in range(3 * num_rows):
        rows = batch_rows(step, batch_size=batch_size, num_rows=num_rows, seed=0)
        parts = [
            micro_batch(
                rows, micro=micro, micro_batch_size=micro_batch_size, rank=rank, world=world
            )
            for micro in range(batch_size // micro_batch_size // world)
            for rank in range(world)
        ]
        assert {len(part) for part in parts} == {micro_batch_size}
        assert sum(len(part) for part in parts) == batch_size
