"""What the user can mend. Anything else that raises is our own bug."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from upcycle.utf8 import shown


class UpcycleError(Exception):
    """A request or an input at fault.

    Args:
        what: what is wrong, with the values seen.
        where: file, key, tensor or layer.
        fix: what would be valid, or the way out.
        details: each of several problems, on a line of its own below `what`.

    Attributes:
        exit_code: the command's: 1 where a check failed, 2 where the input is at fault.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str, fix: str, details: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        self.details = tuple(details)

    def __str__(self) -> str:
        details = (f"  - {detail}" for detail in self.details)
        lines = (self.what, *details, f"  where: {self.where}", f"  fix: {self.fix}")
        return "\n".join(map(_one_line, lines))


def _one_line(text: str) -> str:
    """Names from files may hold line ends, terminal codes and halves of characters."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown(text)
    )


class CheckpointError(UpcycleError):
    """A checkpoint folder that is missing, damaged or contradicts itself."""


class FamilyError(UpcycleError):
    """A model that has no KV heads to merge, or whose layout is not known."""


class PlanError(UpcycleError):
    """A conversion that cannot be done as asked, such as an invalid number of KV heads."""


class OutputError(UpcycleError):
    """An output path that exists, lies inside its source, or cannot be written."""


class DeviceError(UpcycleError):
    """A device that is not known, or that this machine lacks."""


class RecipeError(UpcycleError):
    """A recipe with unknown keys or contradicting values."""


class DataError(UpcycleError):
    """Text that cannot be read, or too little of it."""


class TrainingError(UpcycleError):
    """A training run that cannot start, resume or go on."""


class EvaluationError(UpcycleError):
    """Models that cannot be compared with each other."""


class ExportError(UpcycleError):
    """A model or option that the Core ML export cannot express."""


class StrictError(UpcycleError):
    """A warning, where warnings are asked to count as failures."""

    exit_code = 1


class UpcycleWarning(UserWarning):
    """What the user should know and nothing stops for; the command line prints it on stderr."""


@contextmanager
def unsaid(message: str | None) -> Iterator[None]:
    """Keep one warning back inside, where an error will say the same."""
    with warnings.catch_warnings():
        if message is not None:
            pattern = re.escape(_one_line(message)) + r"\Z"
            warnings.filterwarnings("ignore", pattern, UpcycleWarning)
        yield


def warn(message: str) -> None:
    """Tell the user of something that nothing stops for."""
    warnings.warn(_one_line(message), UpcycleWarning, stacklevel=3)
