"""One thing that had to hold, with the number that was measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One exactness check.

    Attributes:
        name: what must hold.
        measured: the number that was seen; None where the check does not apply.
        limit: the largest number that passes; 0 means bit-identical or equal.
        detail: what was compared, where it failed first, or why it does not apply.
    """

    name: str
    measured: float | None
    limit: float
    detail: str

    @property
    def passed(self) -> bool | None:
        """Whether the number is within its limit (a NaN is not); None if it does not apply."""
        return None if self.measured is None else self.measured <= self.limit

    @property
    def failed(self) -> bool:
        """Whether it applies and did not pass."""
        return self.passed is False
