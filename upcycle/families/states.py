"""The fixed-size states that hybrids keep for each sequence beside their KV cache."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.errors import FamilyError

_Number = Callable[[str], int]


@dataclass(frozen=True)
class _States:
    """A class with layers that keep a state.

    Attributes:
        of_layer: elements of one such layer's state, from a look-up of whole numbers.
        defaults: of those numbers.
        everywhere: whether the layers with attention keep one too.
    """

    of_layer: Callable[[_Number], int]
    defaults: Mapping[str, int | None]
    everywhere: bool = False


def _mamba(number: _Number) -> int:
    """Gu and Dao 2023: a convolution's inputs and d_state numbers for each inner channel."""
    inner = number("mamba_expand") * number("hidden_size")
    return inner * (number("mamba_d_conv") + number("mamba_d_state"))


def _mamba_2(number: _Number) -> int:
    """Dao and Gu 2024: B and C of each group pass through the convolution too."""
    inner = number("mamba_d_ssm") or number("mamba_expand") * number("hidden_size")
    convolved = inner + 2 * number("mamba_n_groups") * number("mamba_d_state")
    return convolved * number("mamba_d_conv") + inner * number("mamba_d_state")


def _short_convolution(number: _Number) -> int:
    return number("hidden_size") * number("conv_L_cache")


def _delta_rule(number: _Number) -> int:
    """Yang et al. 2024, gated DeltaNet: a matrix for each value head, and a convolution."""
    keys = number("linear_num_key_heads") * number("linear_key_head_dim")
    values = number("linear_num_value_heads") * number("linear_value_head_dim")
    convolved = (2 * keys + values) * number("linear_conv_kernel_dim")
    return convolved + values * number("linear_key_head_dim")


_CONVOLUTION = {"hidden_size": 2560, "conv_L_cache": 3}
_MAMBA = {"mamba_expand": 2, "mamba_d_conv": 4, "hidden_size": 4096}
_GROUPS = {**_MAMBA, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_ssm": 0}
_CLASSES: Mapping[str, _States] = {
    "jamba": _States(_mamba, {**_MAMBA, "mamba_d_state": 16}),
    "granitemoehybrid": _States(_mamba_2, _GROUPS),
    "falcon_h1": _States(_mamba_2, {**_GROUPS, "mamba_d_ssm": 1024}, everywhere=True),
    "lfm2": _States(_short_convolution, _CONVOLUTION),
    "lfm2_moe": _States(_short_convolution, {**_CONVOLUTION, "hidden_size": 2048}),
    "qwen3_next": _States(
        _delta_rule,
        {
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
}


def state_elements(config: Mapping[str, Any], *, num_layers: int, attention_layers: int) -> int:
    """Elements of all states of one sequence; they do not grow with it.

    Args:
        config: a raw `config.json`.
        num_layers: layers of the model.
        attention_layers: those with attention.

    Raises:
        FamilyError: a number of the configuration makes no sense.
    """
    found = _CLASSES.get(str(config.get("model_type")))
    if found is None:
        return 0

    def number(key: str) -> int:
        value = config.get(key, found.defaults[key]) or 0
        if type(value) is not int or value < 0:
            raise FamilyError(
                f"{key} is {value!r}, not a whole number",
                where=f"config.json, {key} (model_type {config['model_type']})",
                fix="give what the model was made with",
            )
        return value

    layers = num_layers if found.everywhere else num_layers - attention_layers
    return layers * found.of_layer(number)
