"""Whether the last model keeps the limits that a recipe sets."""

from collections.abc import Mapping

from upcycle.errors import EvaluationError
from upcycle.evaluation.results import Divergence, Margin, Model


def _nll_increase(divergence: Divergence) -> float:
    """The upper end of the interval: not worse than the limit, at 97.5 % confidence."""
    interval = divergence.nll_interval
    return interval.high if interval else divergence.nll_difference


MARGINS = {"kl_mean": lambda divergence: divergence.kl.mean, "nll_increase": _nll_increase}


def check_margins(margins: Mapping[str, float | None]) -> None:
    """Refuse unknown margins before anything is measured.

    Raises:
        EvaluationError: a name that is not in `MARGINS`.
    """
    unknown = sorted(set(margins) - set(MARGINS))
    if unknown:
        raise EvaluationError(
            f"unknown margin {unknown[0]!r}",
            where="margins",
            fix=f"choose from {', '.join(MARGINS)}",
        )


def judge(model: Model, margins: Mapping[str, float | None]) -> list[Margin]:
    """Hold one model against every margin that is set."""
    assert model.divergence is not None
    judged = []
    for name, limit in margins.items():
        if limit is None:
            continue
        value = MARGINS[name](model.divergence)
        judged.append(Margin(name, model.label, limit, value, value <= limit))
    return judged
