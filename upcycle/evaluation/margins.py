"""Whether the last model keeps the limits that a recipe sets."""

from upcycle.evaluation.results import Divergence, Margin, Model
from upcycle.options.evaluate import Margins


def _nll_increase(divergence: Divergence) -> float:
    """The upper end of the interval: not worse than the limit, at 97.5 % confidence."""
    interval = divergence.nll_interval
    return interval.high if interval else divergence.nll_difference


MARGINS = {"kl_mean": lambda divergence: divergence.kl.mean, "nll_increase": _nll_increase}


def judge(model: Model, margins: Margins) -> list[Margin]:
    """Hold one model against every margin that is set."""
    assert model.divergence is not None
    judged = []
    for name, limit in margins:
        if limit is None:
            continue
        value = MARGINS[name](model.divergence)
        judged.append(Margin(name, model.label, limit, value, value <= limit))
    return judged
