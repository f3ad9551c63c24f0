"""Kernels that give the same bits each time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels whose sums have a fixed order: a resumed run then ends in the same bytes.

    Not `warn_only`, under which cuDNN's attention keeps its other order. Measured without cost on
    an H200. The CPU's kernels need no asking.
    """
    if device.type != "cuda":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
