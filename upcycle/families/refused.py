"""Kinds of model that cannot be converted, as `refused.toml` lists them.

The name of a model type says most. A configuration key that marks a kind counts for every other
type, those of families among them, since one class may hold both (Falcon).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.errors import FamilyError

_DATA = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Refusal:
    """A kind of model that has nothing to merge, or whose merged form no plain class can load.

    Attributes:
        kind: its short name.
        reason: completes "model_type x cannot be converted: …".
        way_out: what the user can do instead.
        model_types: values of `model_type` that are of this kind.
        keys: configuration keys that, when set, make any model one of this kind.
    """

    kind: str
    reason: str
    way_out: str
    model_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def key_in(self, config: Mapping[str, Any]) -> str | None:
        """The first of `keys` that a configuration sets, or None."""
        return next((key for key in self.keys if config.get(key)), None)

    def error(self, config: Mapping[str, Any]) -> FamilyError:
        """The error to raise for a configuration of this kind, with the value that tells."""
        key = self.key_in(config)
        seen = "model_type" if key is None else f"{key} is {_short(config[key])}"
        return FamilyError(
            f"model_type {config.get('model_type')!r} cannot be converted: {self.reason}",
            where=f"config.json, {seen}",
            fix=self.way_out,
        )


def refusal(config: Mapping[str, Any], *, supported: bool = False) -> Refusal | None:
    """Why a raw `config.json` cannot be converted, or None.

    Args:
        config: the parsed `config.json`.
        supported: the model type is a family, so that only the keys count.
    """
    model_type = config.get("model_type")
    named = [] if supported else [r for r in REFUSALS if model_type in r.model_types]
    return next(iter([*named, *(r for r in REFUSALS if r.key_in(config))]), None)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = value.get("model_type")
        return f"a {inner!r} model" if inner else f"an object of {len(value)} keys"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _written() -> tuple[Refusal, ...]:
    rows: list[dict[str, Any]] = tomllib.loads(_DATA.read_text(encoding="utf-8"))["refusal"]
    lists = [{key: tuple(v) for key, v in row.items() if isinstance(v, list)} for row in rows]
    return tuple(Refusal(**{**row, **found}) for row, found in zip(rows, lists, strict=True))


REFUSALS = _written()
