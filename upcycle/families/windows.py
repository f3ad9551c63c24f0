"""Which layers of a model attend to a window of the latest tokens alone.

A configuration lists them in `layer_types`, or leaves them to its class; what the classes assume is
the table below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upcycle.errors import FamilyError

_ZERO_MAKES_SENSE = ("first_k_dense_replace", "max_window_layers")


@dataclass(frozen=True)
class _Settings:
    """A raw `config.json` over the defaults of its class."""

    config: Mapping[str, Any]
    defaults: Mapping[str, int]

    def whole(self, key: str) -> int:
        """A whole number.

        Raises:
            FamilyError: it is none.
        """
        value = self.config.get(key, self.defaults.get(key))
        lowest = 0 if key in _ZERO_MAKES_SENSE else 1
        if type(value) is not int or value < lowest:
            raise self._bad(key, value, f"a whole number from {lowest} on")
        return value

    def of_layer(self, key: str, layer: int) -> Any:
        """The entry of a layer in a list that has one for each; None where there is no list.

        Raises:
            FamilyError: it is no list, or too short.
        """
        values = self.config.get(key)
        if not values:
            return None
        if not isinstance(values, list) or layer >= len(values):
            raise self._bad(key, values, "a list with an entry for each layer")
        return values[layer]

    def _bad(self, key: str, value: object, wanted: str) -> FamilyError:
        return FamilyError(
            f"{key} is {str(value)[:60]}, not {wanted}",
            where=f"config.json, {key} (model_type {self.config['model_type']})",
            fix="give what the model was made with",
        )


_Rule = Callable[[_Settings, int], bool]


def _every(_settings: _Settings, _layer: int) -> bool:
    return True


def _none(_settings: _Settings, _layer: int) -> bool:
    return False


def _all_but_last_of(period: int) -> _Rule:
    return lambda _settings, layer: (layer + 1) % period != 0


def _all_but_first_of(period: int) -> _Rule:
    return lambda _settings, layer: layer % period != 0


def _by_period(key: str) -> _Rule:
    return lambda settings, layer: (layer + 1) % settings.whole(key) != 0


def _upper(settings: _Settings, layer: int) -> bool:
    return layer >= settings.whole("max_window_layers")


def _lower_even(settings: _Settings, layer: int) -> bool:
    return layer % 2 == 0 and layer < settings.whole("max_window_layers")


def _after_dense(settings: _Settings, layer: int) -> bool:
    dense = settings.whole("first_k_dense_replace")
    if layer < dense:
        return (layer + 1) % settings.whole("prefix_dense_sliding_window_pattern") != 0
    return (layer - dense + 1) % settings.whole("sliding_window_pattern") != 0


def _where_rotated(rotated: bool) -> _Rule:
    """The layers whose entry in `no_rope_layers` (1 has a rotation) is this one."""

    def rule(settings: _Settings, layer: int) -> bool:
        entry = settings.of_layer("no_rope_layers", layer)
        if entry is None:
            entry = (layer + 1) % settings.whole("no_rope_layer_interval") != 0
        return bool(entry) == rotated

    return rule


@dataclass(frozen=True)
class _Windows:
    """What a class assumes.

    Attributes:
        window: the window in tokens; None for none.
        rule: which layers have it, where `layer_types` does not say.
        defaults: of the numbers that the rule asks for.
        switch: the key without which no layer has a window.
        kind: the name of such a layer in `layer_types`.
        key: the name of the window's length.
    """

    window: int | None
    rule: _Rule = _every
    defaults: Mapping[str, int] = field(default_factory=dict)
    switch: str | None = None
    kind: str = "sliding_attention"
    key: str = "sliding_window"


_PERIOD, _GLOBAL_EVERY = "sliding_window_pattern", "global_attn_every_n_layers"
_SWITCH, _UPPER, _NOPE = "use_sliding_window", "max_window_layers", "no_rope_layer_interval"
_DENSE = {"first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1, _PERIOD: 4}
_CHUNKS = {"kind": "chunked_attention", "key": "attention_chunk_size"}

_CLASSES: Mapping[str, _Windows] = {
    **dict.fromkeys(("mistral", "ministral"), _Windows(4096)),
    **dict.fromkeys(("ministral3", "mixtral", "phi3", "phimoe", "starcoder2"), _Windows(None)),
    **dict.fromkeys(("gemma2", "vaultgemma"), _Windows(4096, _all_but_last_of(2))),
    "gemma3_text": _Windows(4096, _by_period(_PERIOD), {_PERIOD: 6}),
    "gpt_oss": _Windows(128, _all_but_last_of(2)),
    "olmo3": _Windows(4096, _all_but_last_of(4)),
    "kolibri1": _Windows(513, _all_but_last_of(5)),
    **dict.fromkeys(
        ("cohere2", "exaone4", "exaone_moe"), _Windows(4096, _by_period(_PERIOD), {_PERIOD: 4})
    ),
    "cohere2_moe": _Windows(4096, _after_dense, _DENSE),
    "afmoe": _Windows(1024, _by_period(_GLOBAL_EVERY), {_GLOBAL_EVERY: 4}),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _Windows(128, _all_but_first_of(4))),
    "cwm": _Windows(8192, _all_but_first_of(4)),
    **dict.fromkeys(("qwen2", "qwen3"), _Windows(4096, _upper, {_UPPER: 28}, _SWITCH)),
    "qwen2_moe": _Windows(4096, _lower_even, {_UPPER: 28}, _SWITCH),
    "qwen3_moe": _Windows(4096, switch=_SWITCH),
    "dots1": _Windows(4096, _upper, {_UPPER: 62}),
    "smollm3": _Windows(None, _where_rotated(False), {_NOPE: 4}, _SWITCH),
    "mellum": _Windows(1024, _none),
    "llama4_text": _Windows(8192, _where_rotated(True), {_NOPE: 4}, **_CHUNKS),
}


def attention_windows(config: Mapping[str, Any], layers: tuple[int, ...]) -> tuple[int | None, ...]:
    """The window of each of `layers`, in tokens with the newest among them; None for no limit.

    A layer that attends in chunks counts as one with a window of a chunk, its largest reach.

    Args:
        config: a raw `config.json`.
        layers: the layers that have attention.

    Raises:
        FamilyError: a number or a list of the configuration makes no sense.
    """
    found = _class_of(config)
    if found is None or (found.switch and not config.get(found.switch)):
        return (None,) * len(layers)
    if config.get(found.key, found.window) is None:
        return (None,) * len(layers)
    settings = _Settings(config, {**found.defaults, found.key: found.window or 0})
    window = settings.whole(found.key)

    def is_local(layer: int) -> bool:
        kind = settings.of_layer("layer_types", layer)
        return found.rule(settings, layer) if kind is None else bool(kind == found.kind)

    return tuple(window if is_local(layer) else None for layer in layers)


def attends_in_chunks(config: Mapping[str, Any]) -> bool:
    """Whether the windows of a raw `config.json` do not slide: they are aligned chunks."""
    found = _class_of(config)
    return found is not None and found.kind == _CHUNKS["kind"]


def _class_of(config: Mapping[str, Any]) -> _Windows | None:
    return _CLASSES.get(str(config.get("model_type")))
