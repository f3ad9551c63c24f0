"""`upcycle verify`: the exactness checks, each with its measured number."""

from typing import Annotated

import typer

from upcycle.cli.arguments import Source
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.findings import print_checks


@command("verify", epilog="Example: upcycle verify recipes/demo-source out")
def verify_command(
    console: Console,
    source: Source,
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder that convert made.")],
) -> Outcome:
    """Prove what is exact about a conversion: untouched bytes, head order, cache, reload."""
    from upcycle.conversion.verify import verify

    with console.progress() as watch:
        result = verify(source, output, watch=watch)
    print_checks(console, result.checks)
    return Outcome(result.to_dict(), passed=result.passed)
