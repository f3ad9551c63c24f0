"""Numbers as an engineer reads them."""

from math import exp, isfinite
from typing import TypeGuard

MISSING = "\N{EN DASH}"
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"} | {127: 0x2421}
NBSP = "\N{NO-BREAK SPACE}"


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


def integer(value: float | None) -> str:
    """12345 -> "12,345"; a fraction keeps two decimals."""
    if not _is_known(value):
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def millions(count: int) -> str:
    """A parameter count with three significant digits: "3.72 M", "6.74 B"."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g}{NBSP}{unit}"
    return str(count)


def binary_bytes(count: float) -> str:
    """A byte count in binary units: "7.1 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(count) < 1000:
            return f"{count:.3g}{NBSP}{unit}"
        count /= 1024
    return f"{count:,.3g}{NBSP}TiB"


def megabytes(count: float) -> str:
    """A byte count in units of 10^6, the way bandwidths are given."""
    return f"{count / 1e6:.3g}" if count < 1e8 else f"{count / 1e6:,.0f}"


def rate(value: float) -> str:
    """Tokens per second: one decimal below a thousand."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def nats(value: float | None) -> str:
    """A likelihood or divergence: four decimals, or powers of ten where they would all be zero."""
    if not _is_known(value):
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 0.0005 else f"{value:.4f}"


def signed(value: float | None) -> str:
    """A difference with its sign: "+0.0312", with a true minus."""
    if not _is_known(value):
        return MISSING
    return ("\N{MINUS SIGN}" if value < 0 else "+") + nats(abs(value)) if value else "0"


def perplexity(value: float | None) -> str:
    """Five significant digits or so, and powers of ten where there are more than six digits."""
    if not _is_known(value):
        return MISSING
    return f"{value:.2e}" if value >= 1e6 else f"{value:,.{3 if value < 1000 else 1}f}"


def percent(share: float) -> str:
    """A share with two decimals: "96.31 %"."""
    return f"{100 * share:.2f}{NBSP}%" if isfinite(share) else MISSING


def factor(ratio: float) -> str:
    """How many times: "4×", "2.67×"."""
    return f"{ratio:.3g}\N{MULTIPLICATION SIGN}"


def visible(text: str) -> str:
    """White space made visible where a text is nothing else; other text as it is."""
    if text.strip():
        return text
    return text.replace(" ", "␣").replace("\t", "⇥").replace("\n", "↵\n")


def inline(text: str, most: int = 60) -> str:
    """The end of a text on one line, its line breaks and tabs made visible."""
    short = text if len(text) <= most else "…" + text[-most:]
    return short.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")


def probability(nll: float) -> str:
    """exp(-nll) as a percentage; one digit where two decimals would be nothing."""
    share = 100 * exp(-nll)
    return f"{share:.2f}{NBSP}%" if share >= 0.01 else f"{share:.1g}{NBSP}%"


def pictured(page: str) -> str:
    """A page whose control characters, which no page may have, are Unicode's pictures of them."""
    return page.translate(_PICTURES)


def short_hash(value: str) -> str:
    """The algorithm and the first 12 digits of a content hash."""
    algorithm, _, digest = value.partition(":")
    return f"{algorithm}:{digest[:12]}"
