"""What a check of an exported package found, and what must hold."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from upcycle.checks import Check
from upcycle.parity.logits import LogitsDifference
from upcycle.parity.overflow import Extreme
from upcycle.program.values import LARGEST_FP16


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


# The largest difference that passes, as a part of the logits' range, by whether it is fp32.
LIMITS = {True: 5e-3, False: 5e-2}
TYPICAL = 2e-2  # in fp16, of the median position


def rules(found: Arithmetic, max_kl: float | None, *, compressed: bool = False) -> Iterator[Check]:
    """The checks of one arithmetic.

    Args:
        found: what was measured.
        max_kl: the largest KL to the whole checkpoint that passes, nats; any where None.
        compressed: whether the program's weights are not the checkpoint's, and so their logits.
    """
    name, limit = found.name, LIMITS[found.exact]
    pairs = {
        "logits": found.text,
        "end of context": found.end,
        "checkpoint's numbers": found.full if found.exact and not compressed else None,
        "prefill = decode": found.prefill,
        "other package": found.against,
    }
    for what, difference in pairs.items():
        if difference is None:
            continue
        yield Check(f"{name}: {what}", difference.relative, limit, _describe(difference))
        if not found.exact:
            detail = "the median over all positions"
            yield Check(f"{name}: {what}, typical", difference.typical_relative, TYPICAL, detail)
        yield Check(
            f"{name}: {what}, best token",
            difference.broken,
            0,
            f"differs at {difference.broken} of {difference.decided} decided positions, and at "
            f"{difference.positions - difference.agreeing - difference.broken} others",
        )
    if found.caches is not None:
        detail = "K and V after prefill and after decoding"
        yield Check(f"{name}: prefill = decode, caches", found.caches, limit, detail)
    if name == "fp16":
        first = f", first {found.overflowed[0].value}" if found.overflowed else ""
        detail = f"results beyond {LARGEST_FP16:,}{first}"
        yield Check(f"{name}: overflows", len(found.overflowed), 0, detail)
    if max_kl is not None:
        detail = "mean over all positions, nats"
        yield Check(f"{name}: KL to the checkpoint", found.full.kl, max_kl, detail)


def _describe(difference: LogitsDifference) -> str:
    return (
        f"largest difference {difference.maximum:.3g}, typical {difference.typical:.3g}, "
        f"of a range of {difference.logit_range:.3g} over {difference.positions} positions, of "
        f"which {difference.excused} are excused: rounding alone moves torch there"
    )
