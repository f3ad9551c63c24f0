"""What layers keep of a sequence beside the keys and values of every token.

Some attend to a window of the latest tokens alone: a configuration lists them in `layer_types`, or
leaves them to the rule of its class. Hybrids keep states of a fixed size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from upcycle.families.class_config import ClassConfig

WindowRule = Callable[[ClassConfig, int], bool]


def every_layer(_config: ClassConfig, _layer: int) -> bool:
    """All layers."""
    return True


def no_layer(_config: ClassConfig, _layer: int) -> bool:
    """None but those that `layer_types` lists."""
    return False


def all_but_last_of(period: int | str) -> WindowRule:
    """All but the last layer of each period, a number or the key of one."""
    return lambda config, layer: (
        (layer + 1) % (config.whole(period) if isinstance(period, str) else period) != 0
    )


def all_but_first_of(period: int) -> WindowRule:
    """All but the first layer of each period."""
    return lambda _config, layer: layer % period != 0


def upper_layers(config: ClassConfig, layer: int) -> bool:
    """The layers from `max_window_layers` on."""
    return layer >= config.whole("max_window_layers")


def lower_even_layers(config: ClassConfig, layer: int) -> bool:
    """Every other layer below `max_window_layers`, the first among them."""
    return layer % 2 == 0 and layer < config.whole("max_window_layers")


def after_dense_layers(config: ClassConfig, layer: int) -> bool:
    """All but the last of each period, with another period in the dense layers before."""
    dense = config.whole("first_k_dense_replace")
    if layer < dense:
        return (layer + 1) % config.whole("prefix_dense_sliding_window_pattern") != 0
    return (layer - dense + 1) % config.whole("sliding_window_pattern") != 0


def where_rotated(rotated: bool) -> WindowRule:
    """The layers whose entry in `no_rope_layers` (1 has a rotation) is this one."""

    def rule(config: ClassConfig, layer: int) -> bool:
        entry = config.of_layer("no_rope_layers", layer)
        if entry is None:
            entry = (layer + 1) % config.whole("no_rope_layer_interval") != 0
        return bool(entry) == rotated

    return rule


@dataclass(frozen=True)
class Windows:
    """The windows of a class.

    Attributes:
        rule: which layers have one, where `layer_types` does not say.
        switch: the key without which no layer has one.
        key: the key of its length in tokens; where it is null no layer has one.
        kind: the name of such a layer in `layer_types`.
    """

    rule: WindowRule = every_layer
    switch: str | None = None
    key: str = "sliding_window"
    kind: Literal["sliding_attention", "chunked_attention"] = "sliding_attention"

    @property
    def chunked(self) -> bool:
        """Whether they do not slide: they are aligned chunks."""
        return self.kind == "chunked_attention"

    def of_layers(self, config: ClassConfig, layers: tuple[int, ...]) -> tuple[int | None, ...]:
        """The window of each of `layers`; None for no limit.

        Raises:
            FamilyError: a number or a list of the configuration makes no sense.
        """
        is_off = self.switch is not None and not config.setting(self.switch)
        if is_off or config.setting(self.key) is None:
            return (None,) * len(layers)
        window = config.whole(self.key)

        def is_local(layer: int) -> bool:
            kind = config.of_layer("layer_types", layer)
            return self.rule(config, layer) if kind is None else bool(kind == self.kind)

        return tuple(window if is_local(layer) else None for layer in layers)


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
