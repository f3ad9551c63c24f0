"""Memory sizes as people write them."""

import re
from decimal import Decimal

from upcycle.errors import UpcycleError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, *, where: str) -> int:
    """The bytes of a size such as "80GiB" (binary), "140GB" (decimal) or "1073741824".

    Args:
        text: a number of 0 or more with a unit B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or none.
        where: the option that it came from, for the error.

    Raises:
        UpcycleError: the text is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UpcycleError(
            f"{text!r} is not a memory size",
            where=where,
            fix="write it as 80GiB (1024-based), 80GB (1000-based), or in plain bytes",
        )
    return int(Decimal(match[1]) * factor)
