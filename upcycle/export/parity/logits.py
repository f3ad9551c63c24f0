"""How far two models' logits on the same tokens are apart."""

import math
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """Logits against those of a reference, over all positions.

    Attributes:
        positions: tokens compared.
        maximum: largest |difference| of a logit; infinite where a logit is no number.
        typical: the median over positions of their largest |difference|. Rounding may throw single
            positions of a model far off; a fault in its program shows in most of them.
        mean: mean |difference|.
        logit_range: largest minus smallest logit of the reference.
        kl: mean KL(reference ‖ other) of the next-token distributions, nats.
        agreeing: positions where both have the same most likely token.
        decided: positions where the reference's two best logits are more than twice `maximum`
            apart, so that the most likely token must be the same.
        broken: decided positions where it is not.
    """

    positions: int
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
        return self.maximum / self.logit_range

    @property
    def typical_relative(self) -> float:
        """The typical difference likewise."""
        return self.typical / self.logit_range


def compare_logits(reference: Tensor, other: Tensor) -> Difference:
    """Compare logits [N, vocabulary] of the same N tokens, computed in fp64."""
    rows = [_Row.of(*pair) for pair in zip(reference, other, strict=True)]
    maximum = max(row.maximum for row in rows)
    decided = [row for row in rows if row.margin > 2 * maximum]
    return Difference(
        positions=len(rows),
        maximum=maximum,
        typical=median(row.maximum for row in rows),
        mean=sum(row.mean for row in rows) / len(rows),
        logit_range=float(reference.max() - reference.min()),
        kl=sum(row.kl for row in rows) / len(rows),
        agreeing=sum(row.agrees for row in rows),
        decided=len(decided),
        broken=sum(not row.agrees for row in decided),
    )


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
