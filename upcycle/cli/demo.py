"""`upcycle demo`: all of it, on the small model that comes with the package."""

import json
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Overwrite
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.init import DEMO, shipped_recipes
from upcycle.cli.run import run_recipe


@command("demo", epilog="Example: upcycle demo")
def demo_command(
    console: Console,
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder of every result.")
    ] = Path("upcycle-demo"),
    overwrite: Overwrite = False,
) -> Outcome:
    """Convert, train, evaluate, export and report the small model that comes with upcycle.

    It takes minutes on two cores. `upcycle init DIR --demo` writes its recipes and files to DIR.
    """
    where = json.dumps(str(output), ensure_ascii=False)  # a name that YAML would take for a number
    return run_recipe(console, shipped_recipes() / DEMO, [f"output={where}"], overwrite=overwrite)
