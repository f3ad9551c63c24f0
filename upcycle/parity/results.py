"""What a check of an exported package found."""

from dataclasses import asdict, dataclass
from typing import Any

from upcycle.checks import Check
from upcycle.parity.logits import LogitsDifference
from upcycle.parity.overflow import Extreme


@dataclass(frozen=True)
class Arithmetic:
    """How a program did in one arithmetic.

    Attributes:
        name: "fp32" or "fp16", or that of Apple's runtime.
        exact: whether it computes in fp32.
        text: against the reference, on the text from position 0.
        end: the same on tokens at the end of the context.
        prefill: prefill against decoding the same tokens; None without prefill.
        caches: K and V likewise, the largest difference as a part of their largest magnitude.
        full: against the whole checkpoint, without the rounding or compression of its weights.
        against: against another package.
        largest: the operations with the largest results.
        overflowed: those whose results do not fit into fp16.
    """

    name: str
    exact: bool
    text: LogitsDifference
    end: LogitsDifference
    prefill: LogitsDifference | None
    caches: float | None
    full: LogitsDifference
    against: LogitsDifference | None
    largest: list[Extreme]
    overflowed: list[Extreme]


@dataclass(frozen=True)
class ExportCheck:
    """All that was found.

    Attributes:
        arithmetics: one result for each.
        checks: what had to hold.
        tokens: tokens of the text.
        prefilled: how many of them went through `prefill`.
        compressed: parameters that the reference took from the package.
    """

    arithmetics: list[Arithmetic]
    checks: list[Check]
    tokens: int
    prefilled: int
    compressed: int

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        return asdict(self) | {"checks": checks, "passed": self.passed}
