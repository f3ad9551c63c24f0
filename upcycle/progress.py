"""How long work reports its progress; the command line draws it, libraries ignore it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A moment of long work.

    Attributes:
        task: what is being done, such as "convert" or "train".
        done: units finished so far.
        total: units in all.
        unit: what is counted, such as "B", "steps" or "tokens".
        note: a short status beside the bar, such as the loss.
    """

    task: str
    done: float
    total: float
    unit: str
    note: str = ""


Watcher = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """A watcher that does nothing."""
