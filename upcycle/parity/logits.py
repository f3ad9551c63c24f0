"""How far two models' logits on the same tokens are apart."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitsDifference:
    """Logits against those of a reference, over all positions.

    Attributes:
        positions: tokens compared.
        excused: positions that `maximum` and `decided` leave out, see `shaky_positions`.
        maximum: largest |difference| of a logit; infinite where a logit is not finite.
        typical: the median over all positions of their largest |difference|.
        mean: mean |difference|.
        logit_range: largest minus smallest logit of the reference.
        kl: mean KL(reference ‖ other) of the next-token distributions, nats.
        agreeing: positions where both have the same most likely token.
        decided: positions where the reference's two best logits are more than twice `maximum`
            apart, so that the most likely token must be the same.
        broken: decided positions where it is not.
    """

    positions: int
    excused: int
    maximum: float
    typical: float
    mean: float
    logit_range: float
    kl: float
    agreeing: int
    decided: int
    broken: int

    @property
    def relative(self) -> float:
        """The largest difference as a part of the logits' range."""
        return _part(self.maximum, self.logit_range)

    @property
    def typical_relative(self) -> float:
        """The typical difference likewise."""
        return _part(self.typical, self.logit_range)


def _part(difference: float, whole: float) -> float:
    """A part of a range; logits that are all the same have none."""
    if whole == 0:
        return math.inf if difference else 0.0
    return difference / whole


def compare_logits(
    reference: Tensor, other: Tensor, excused: Tensor | None = None
) -> LogitsDifference:
    """Compare logits [N, vocabulary] of the same N tokens, computed in fp64.

    Args:
        reference: what they should be.
        other: what they are.
        excused: [N] of booleans, of `shaky_positions`; none where it is None.
    """
    rows = [_Row.of(*pair) for pair in zip(reference, other, strict=True)]
    flags = [False] * len(rows) if excused is None else excused.tolist()
    steady = [row for row, flag in zip(rows, flags, strict=True) if not flag]
    maximum = max((row.maximum for row in steady), default=math.inf)
    decided = [row for row in steady if row.margin > 2 * maximum]
    return LogitsDifference(
        positions=len(rows),
        excused=len(rows) - len(steady),
        maximum=maximum,
        typical=median(row.maximum for row in rows),
        mean=sum(row.mean for row in rows) / len(rows),
        logit_range=float(reference.max() - reference.min()),
        kl=sum(row.kl for row in rows) / len(rows),
        agreeing=sum(row.agrees for row in rows),
        decided=len(decided),
        broken=sum(not row.agrees for row in decided),
    )


def shaky_positions(reference: Tensor, shaken: Iterable[Tensor], limit: float) -> Tensor:
    """Where rounding alone moves a model's logits too far to say anything about a program of it.

    Some models have single positions at which the last bit decides between far values: those with
    badly merged heads, and those whose router finds two experts equally good. A position is excused
    where torch itself, rounded to a program's precision, is off by more than half the limit; not
    where it overflows.

    Args:
        reference: logits [N, vocabulary] of the model.
        shaken: the same of the model in torch, rounded in one way or another.
        limit: the largest difference that passes, as a part of the logits' range.

    Returns:
        [N] of booleans.
    """
    shaky = torch.zeros(len(reference), dtype=torch.bool)
    for rounded in shaken:
        moved = (rounded - reference).abs().amax(-1) / (reference.max() - reference.min())
        shaky |= moved.isfinite() & (moved > limit / 2)
    return shaky


class _Row(NamedTuple):
    """One position; a vocabulary in fp64 is large, so each has its turn."""

    maximum: float
    mean: float
    margin: float
    kl: float
    agrees: bool

    @classmethod
    def of(cls, reference: Tensor, other: Tensor) -> "_Row":
        reference, other = reference.double(), other.double()
        apart = (other - reference).abs()
        first, second = reference.topk(2).values.tolist()
        expected = torch.log_softmax(reference, -1)
        kl = (expected.exp() * (expected - torch.log_softmax(other, -1))).sum()
        sane = bool(other.isfinite().all())
        return cls(
            maximum=float(apart.max()) if sane else math.inf,
            mean=float(apart.mean()),
            margin=first - second,
            kl=float(kl) if sane else math.inf,
            agrees=sane and bool(reference.argmax() == other.argmax()),
        )
