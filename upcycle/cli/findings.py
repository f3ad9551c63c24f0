"""How commands show what they found: checks that had to hold, and a comparison."""

from collections.abc import Sequence

from upcycle.checks import Check
from upcycle.cli.console import Console
from upcycle.evaluation.results import Comparison
from upcycle.report import summary


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """A table of all checks, then what each that failed or does not apply was about."""
    console.table(
        ["check", "measured", "limit", ""],
        [
            [
                check.name,
                "-" if check.measured is None else f"{check.measured:.3g}",
                f"{check.limit:.3g}",
                _verdict(check),
            ]
            for check in checks
        ],
    )
    for check in checks:
        if check.failed:
            console.print(f"failed: {check.name}: {check.detail}")
        if check.measured is None:
            console.print(f"not applicable: {check.name}: {check.detail}")


def _verdict(check: Check) -> str:
    if check.measured is None:
        return "not applicable"
    return "ok" if check.passed else "FAILED"


def print_comparison(
    console: Console, comparison: Comparison, warnings: Sequence[str] = ()
) -> None:
    """One row per model, what they were measured on, and what the margins say.

    Args:
        console: where to print.
        comparison: what was measured.
        warnings: those of the report.
    """
    for warning in warnings:
        console.print(f"warning: {warning}")
    text = comparison.text
    console.print(f"{text.tokens:,} tokens of {text.name}, {text.documents:,} documents")
    if text.losses:
        console.print(f"not all of the text was used: {text.losses}")
    header, *rows = summary.overview(comparison)
    console.table(header, rows)
    for line in summary.margin_lines(comparison):
        console.print(line)
    console.print(summary.verdict(comparison).headline)
