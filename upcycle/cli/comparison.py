"""Print a comparison: the table of models and the verdict."""

from collections.abc import Sequence

from upcycle.cli.console import Console
from upcycle.evaluation.results import Comparison
from upcycle.report import summary


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
