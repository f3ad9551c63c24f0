"""The fixed-size states that hybrids keep for each sequence beside their KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

from upcycle.families.class_config import ClassConfig


@dataclass(frozen=True)
class States:
    """The states of a class.

    Attributes:
        of_layer: elements of one layer's state; they do not grow with the sequence.
        everywhere: whether the layers with attention keep one too.
    """

    of_layer: Callable[[ClassConfig], int]
    everywhere: bool = False


def mamba(config: ClassConfig) -> int:
    """Gu and Dao 2023: a convolution's inputs and d_state numbers for each inner channel."""
    inner = config.size("mamba_expand") * config.size("hidden_size")
    return inner * (config.size("mamba_d_conv") + config.size("mamba_d_state"))


def mamba_2(config: ClassConfig) -> int:
    """Dao and Gu 2024: B and C of each group pass through the convolution too."""
    inner = config.size("mamba_d_ssm") or config.size("mamba_expand") * config.size("hidden_size")
    convolved = inner + 2 * config.size("mamba_n_groups") * config.size("mamba_d_state")
    return convolved * config.size("mamba_d_conv") + inner * config.size("mamba_d_state")


def short_convolution(config: ClassConfig) -> int:
    """The inputs of a convolution over the hidden state."""
    return config.size("hidden_size") * config.size("conv_L_cache")


def delta_rule(config: ClassConfig) -> int:
    """Yang et al. 2024, gated DeltaNet: a matrix for each value head, and a convolution."""
    keys = config.size("linear_num_key_heads") * config.size("linear_key_head_dim")
    values = config.size("linear_num_value_heads") * config.size("linear_value_head_dim")
    convolved = (2 * keys + values) * config.size("linear_conv_kernel_dim")
    return convolved + values * config.size("linear_key_head_dim")
