"""Numbers as text."""

import pytest

from upcycle.evaluation.results import Interval
from upcycle.pages import formatting as fmt
from upcycle.report.summary import interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fmt.integer(4096), "4,096"),
        (fmt.integer(1024.5), "1,024.50"),
        (fmt.millions(3_739_904), "3.74 M"),
        (fmt.millions(6_740_000_000), "6.74 B"),
        (fmt.millions(12), "12"),
        (fmt.binary_bytes(512), "512 B"),
        (fmt.binary_bytes(512 * 1024), "512 KiB"),
        (fmt.binary_bytes(7_479_768), "7.13 MiB"),
        (fmt.binary_bytes(1023 * 1024), "0.999 MiB"),
        (fmt.binary_bytes(3 << 40), "3 TiB"),
        (fmt.megabytes(7_315_312), "7.32"),
        (fmt.megabytes(1_030_000_000), "1,030"),
        (fmt.rate(54.27), "54.3"),
        (fmt.nats(0.04125), "0.0413"),
        (fmt.nats(3.1e-10), "3.1e-10"),
        (fmt.nats(0), "0"),
        (fmt.signed(0.0371), "+0.0371"),
        (fmt.signed(-0.0371), "-0.0371"),
        (fmt.signed(0), "0"),
        (interval(Interval(low=-0.01, high=0.02)), "[-0.0100, +0.0200]"),
        (interval(None), "-"),
        (fmt.perplexity(31.3933), "31.393"),
        (fmt.perplexity(48485.73), "48,485.7"),
        (fmt.perplexity(7.2e23), "7.20e+23"),
        (fmt.perplexity(None), "-"),
        (fmt.percent(0.98627), "98.63 %"),
        (fmt.percent(float("nan")), "-"),
        (fmt.factor(4.0), "4x"),
        (fmt.probability(0.5), "60.65 %"),
        (fmt.probability(9.4), "0.008 %"),
        (fmt.inline("a\n\tb"), "a↵⇥b"),
        (fmt.inline("abcdef", most=3), "…def"),
        (fmt.visible("\n"), "↵\n"),
        (fmt.visible(" a "), " a "),
        (fmt.short_hash("xxh3-128:0123456789abcdef"), "xxh3-128:0123456789ab"),
    ],
)
def test_numbers_read_well(text: str, expected: str) -> None:
    plain = {fmt.NBSP: " ", "\N{MINUS SIGN}": "-", fmt.MISSING: "-", "\N{MULTIPLICATION SIGN}": "x"}
    assert text.translate(str.maketrans(plain)) == expected
