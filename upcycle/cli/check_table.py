"""How commands show what had to hold."""

from typing import TYPE_CHECKING

from upcycle.cli.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from upcycle.checks import Check


def print_checks(console: Console, checks: "Iterable[Check]") -> None:
    """A table of all checks, then what each that failed or does not apply was about."""
    checks = list(checks)
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


def _verdict(check: "Check") -> str:
    if check.measured is None:
        return "not applicable"
    return "ok" if check.passed else "FAILED"
