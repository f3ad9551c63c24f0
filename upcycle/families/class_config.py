"""A raw `config.json` over the defaults of its class, as the rules of a family read it.

`class_defaults.json` has what transformers' classes assume, written by
`scripts/make_class_defaults.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from upcycle.errors import FamilyError

DATA = Path(__file__).with_name("class_defaults.json")
_ZERO_MAKES_SENSE = ("first_k_dense_replace", "max_window_layers")


def class_defaults(model_type: str) -> Mapping[str, Any]:
    """What a class of transformers assumes for keys that `config.json` leaves out.

    Only keys that are read here and have a default that is no null and no list; none for a class
    that no family describes.
    """
    return _all_defaults().get(model_type, {})


@cache
def _all_defaults() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class ClassConfig:
    """What a rule asks a configuration.

    Attributes:
        model_type: whose it is.
        setting: the value of a key, or the class default, or None.
    """

    model_type: str
    setting: Callable[[str], Any]

    def whole(self, key: str) -> int:
        """A whole number.

        Raises:
            FamilyError: it is none.
        """
        value = self.setting(key)
        lowest = 0 if key in _ZERO_MAKES_SENSE else 1
        if type(value) is not int or value < lowest:
            raise self._bad(key, str(value)[:60], f"a whole number from {lowest} on")
        return value

    def size(self, key: str) -> int:
        """A whole number that is 0 where nothing is said.

        Raises:
            FamilyError: it is something else.
        """
        value = self.setting(key) or 0
        if type(value) is not int or value < 0:
            raise self._bad(key, repr(value), "a whole number")
        return value

    def of_layer(self, key: str, layer: int) -> Any:
        """The entry of a layer in a list that has one for each; None where there is no list.

        Raises:
            FamilyError: it is no list, or too short.
        """
        values = self.setting(key)
        if not values:
            return None
        if not isinstance(values, list) or layer >= len(values):
            raise self._bad(key, str(values)[:60], "a list with an entry for each layer")
        return values[layer]

    def _bad(self, key: str, value: str, wanted: str) -> FamilyError:
        return FamilyError(
            f"{key} is {value}, not {wanted}",
            where=f"config.json, {key} (model_type {self.model_type})",
            fix="give what the model was made with",
        )
