"""`upcycle doctor`: what would go wrong later, found now."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Overrides
from upcycle.cli.console import Console, Outcome, command


@command("doctor", epilog="Example: upcycle doctor recipes/demo.yaml")
def doctor_command(
    console: Console,
    recipe_file: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Also check this recipe's run.")
    ] = None,
    overrides: Overrides = None,
) -> Outcome:
    """Check the installation and, with a recipe, everything that its run relies on."""
    from upcycle.pipeline.preflight import preflight

    checks = []
    for number, check in enumerate(preflight(recipe_file, overrides or ()), start=1):
        verdict = "ok" if check.passed else "failed"
        console.print(f"{number:2}. {verdict:6}  {check.name}: {check.detail}")
        checks.append(check)
    passed = all(check.passed for check in checks)
    return Outcome({"checks": [asdict(check) for check in checks]}, passed)
