"""How commands show what had to hold."""

from typing import TYPE_CHECKING

from upcycle.cli.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from upcycle.conversion.checks import Check


def print_checks(console: Console, checks: "Iterable[Check]") -> None:
    """A table of all checks, then what each that failed was about."""
    checks = list(checks)
    console.table(
        ["check", "measured", "limit", ""],
        [
            [
                check.name,
                f"{check.measured:.3g}",
                f"{check.limit:.3g}",
                "ok" if check.passed else "FAILED",
            ]
            for check in checks
        ],
    )
    for check in checks:
        if not check.passed:
            console.print(f"failed: {check.name}: {check.detail}")
