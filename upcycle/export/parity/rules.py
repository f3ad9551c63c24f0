"""What must hold between an exported program and its reference."""

from collections.abc import Iterator

from upcycle.conversion.checks import Check
from upcycle.export.parity.logits import Difference
from upcycle.export.parity.results import Arithmetic

# The largest difference that passes, as a part of the logits' range.
EXACT = 5e-3
# In fp16 the typical one counts: single positions may be as far off as in torch's own fp16.
ROUNDED = 2e-2


def rules(found: Arithmetic, max_kl: float | None) -> Iterator[Check]:
    """The checks of one arithmetic.

    Args:
        found: what was measured.
        max_kl: the largest KL to the whole checkpoint that passes, nats; any where None.
    """
    name, exact = found.name, found.name == "fp32"
    limit = EXACT if exact else ROUNDED
    pairs = {
        "logits": found.text,
        "end of context": found.end,
        "prefill = decode": found.prefill,
        "other package": found.against,
    }
    for what, difference in pairs.items():
        if difference is not None:
            measured = difference.relative if exact else difference.typical_relative
            yield Check(f"{name}: {what}", measured, limit, _describe(difference))
            yield Check(
                f"{name}: {what}, best token",
                difference.broken,
                0,
                f"differs at {difference.broken} of {difference.decided} decided positions, and at "
                f"{difference.positions - difference.agreeing - difference.broken} undecided ones",
            )
    caches = found.caches if exact else found.typical_caches
    if caches is not None:
        detail = "K and V after prefill and after decoding"
        yield Check(f"{name}: prefill = decode, caches", caches, limit, detail)
    if name == "fp16":
        first = f", first {found.overflowed[0].value}" if found.overflowed else ""
        detail = f"results beyond 65,504{first}"
        yield Check(f"{name}: overflows", len(found.overflowed), 0, detail)
    if max_kl is not None:
        detail = "mean over all positions, nats"
        yield Check(f"{name}: KL to the checkpoint", found.full.kl, max_kl, detail)


def _describe(difference: Difference) -> str:
    return (
        f"largest difference {difference.maximum:.3g}, typical {difference.typical:.3g}, "
        f"of a range of {difference.logit_range:.3g} over {difference.positions} positions"
    )
