"""`upcycle run`: all stages of a recipe."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from upcycle import stopping
from upcycle.cli.arguments import Overrides, RecipeFile
from upcycle.cli.console import Console, Outcome, command, launcher
from upcycle.cli.findings import print_comparison


@command("run", together=True, epilog="Example: upcycle run recipes/demo.yaml")
def run_command(
    console: Console,
    recipe: RecipeFile,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what other commands or another recipe made there, even if trained.",
        ),
    ] = False,
) -> Outcome:
    """Convert, train, evaluate, export and report by a recipe; finished stages are skipped.

    For several processes in training: torchrun --nproc-per-node N -m upcycle run RECIPE
    """
    return run_recipe(console, recipe, overrides or [], overwrite=overwrite)


def run_recipe(
    console: Console, recipe: Path, overrides: Sequence[str], *, overwrite: bool
) -> Outcome:
    """Run a recipe and show what came of it.

    Args:
        console: where to print.
        recipe: its file.
        overrides: `section.key=value` strings.
        overwrite: see `run`.

    Raises:
        UpcycleError: as for `load_recipe` and `run`.
    """
    from upcycle.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides)
    command_line = shlex.join(["upcycle", "run", str(recipe), *overrides])
    stopping.advise(
        lambda: (
            "finished stages and training states are kept; go on with: "
            + shlex.join([*launcher(), *shlex.split(command_line)[1:]])
        )
    )

    from upcycle.pipeline import run
    from upcycle.pipeline.training import join
    from upcycle.report.render import HTML_NAME
    from upcycle.training.team import team

    crew = team()
    if crew is not None and not crew.is_first:
        join(loaded, crew)
        return Outcome({})

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        console.print(text)

    def announce(stage: str, skipped: bool) -> None:
        console.print(f"{stage}: {'finished before' if skipped else 'running'}")

    with console.progress() as watch:
        result = run(
            loaded,
            command=command_line,
            inputs=[recipe],
            overwrite=overwrite,
            watch=watch,
            announce=announce,
            note=note,
        )
    print_comparison(console, result.report.comparison, result.report.warnings)
    console.print(f"report   {result.layout.report / HTML_NAME}")
    if result.package is not None:
        console.print(f"package  {result.package}")
    return Outcome(
        {
            "output": str(result.layout.output),
            "skipped": list(result.skipped),
            "notes": notes,
            "report": result.report.to_dict(),
        },
        passed=result.passed,
    )
