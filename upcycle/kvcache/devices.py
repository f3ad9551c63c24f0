"""Memory and bandwidth of named accelerators, from the datasheets that `devices.json` names."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from upcycle.byte_sizes import parse_bytes
from upcycle.errors import UpcycleError

_DATA = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: what users call it.
        memory: bytes.
        bandwidth: of the memory, bytes a second.
        source: the datasheet.
    """

    name: str
    memory: int
    bandwidth: int
    source: str

    def step_seconds(self, step_bytes: int, gpus: int) -> float:
        """The shortest time in which `gpus` of them can read `step_bytes`, evenly spread."""
        return step_bytes / (gpus * self.bandwidth)


@cache
def devices() -> tuple[Device, ...]:
    """All that are known."""
    return tuple(
        Device(
            row["name"],
            parse_bytes(row["memory"], where=row["name"]),
            parse_bytes(row["bandwidth"], where=row["name"]),
            row["source"],
        )
        for row in json.loads(_DATA.read_text(encoding="utf-8"))
    )


def device_named(name: str) -> Device:
    """The device of that name, in whatever case.

    Raises:
        UpcycleError: there is none.
    """
    for device in devices():
        if device.name.casefold() == name.casefold():
            return device
    raise UpcycleError(
        f"unknown device {name!r}",
        where="--gpu",
        fix=f"choose one of {', '.join(device.name for device in devices())}, or omit it",
    )
