"""A GPU is asked for kernels of a fixed order during a run, and given back as it was."""

import torch

from upcycle.training.step import deterministic


def test_a_gpu_is_asked_strictly_and_the_setting_restored() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        # Under warn_only, cuDNN's attention keeps an order that changes from run to run.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_cpu_is_left_alone() -> None:
    with deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
