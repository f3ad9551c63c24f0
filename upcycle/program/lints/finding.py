"""What a lint is and what it finds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar
from typing import Literal as OneOf

from upcycle.program.graph import Function, Graph

Subject = TypeVar("Subject", Function, Graph)
Severity = OneOf["error", "warning", "note"]
Found = tuple[str, str]
"""Where (the name of a value, state or function) and what is the matter there."""


@dataclass(frozen=True)
class Lint(Generic[Subject]):
    """A rule of a function, or of a package as a whole, read off the program alone.

    Attributes:
        name: of the rule.
        severity: "error" where the program is wrong or will not run on a phone, "warning" where it
            is slower or less exact than it could be, "note" for what is good to know.
        check: every place where the rule is broken.
        fix: what to do about it.
    """

    name: str
    severity: Severity
    check: Callable[[Subject], Iterable[Found]]
    fix: str


@dataclass(frozen=True)
class Finding:
    """A rule that is broken, with all the places of one function.

    Attributes:
        lint: name of the rule.
        severity: of the rule.
        function: where; empty for the package as a whole.
        places: names of the values, states or functions.
        what: what is the matter in the first place.
        fix: what to do about it.
    """

    lint: str
    severity: Severity
    function: str
    places: tuple[str, ...]
    what: str
    fix: str
