"""What must hold between an exported program and its reference."""

from collections.abc import Iterator

from upcycle.conversion.checks import Check
from upcycle.export.parity.logits import Difference
from upcycle.export.parity.results import Arithmetic

# The largest difference of a logit that passes, as a part of the logits' range. Weights and caches
# are fp16 in any arithmetic, so fp32 is not exact either.
LIMITS = {"fp32": 5e-3, "fp16": 5e-2, "Core ML": 5e-2}


def rules(found: Arithmetic, max_kl: float | None) -> Iterator[Check]:
    """The checks of one arithmetic.

    Args:
        found: what was measured.
        max_kl: the largest KL to the whole checkpoint that passes, nats; any where None.
    """
    name, limit = found.name, LIMITS[found.name]
    pairs = {
        "logits": found.text,
        "end of context": found.end,
        "prefill = decode": found.prefill,
        "other package": found.against,
    }
    for what, difference in pairs.items():
        if difference is not None:
            yield Check(f"{name}: {what}", difference.relative, limit, _describe(difference))
            yield Check(
                f"{name}: {what}, best token",
                difference.broken,
                0,
                f"differs at {difference.broken} of {difference.decided} decided positions, and at "
                f"{difference.positions - difference.agreeing - difference.broken} undecided ones",
            )
    if found.caches is not None:
        detail = "K and V after prefill and after decoding"
        yield Check(f"{name}: prefill = decode, caches", found.caches, limit, detail)
    if name == "fp16":
        first = f", first {found.overflowed[0].value}" if found.overflowed else ""
        detail = f"results beyond 65,504{first}"
        yield Check(f"{name}: overflows", len(found.overflowed), 0, detail)
    if max_kl is not None:
        kl = (found.full or found.text).kl
        yield Check(f"{name}: KL to the checkpoint", kl, max_kl, "mean over all positions, nats")


def _describe(difference: Difference) -> str:
    return (
        f"largest difference {difference.maximum:.3g} of a range of {difference.logit_range:.3g} "
        f"over {difference.positions} positions"
    )
