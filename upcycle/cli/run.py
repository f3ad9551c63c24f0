"""`upcycle run`: all stages of a recipe."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from upcycle import stopping
from upcycle.cli.console import Console, Outcome, command, launcher


@command("run", together=True, epilog="Example: upcycle run recipes/demo.yaml")
def run_command(
    console: Console,
    recipe: Annotated[Path, typer.Argument(help="A recipe, .yaml or .py.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what other commands or another recipe made there, trained or not.",
        ),
    ] = False,
) -> Outcome:
    """Convert, train, evaluate, export and report by a recipe; finished stages are skipped.

    For several processes in training: torchrun --nproc-per-node N -m upcycle run RECIPE
    """
    from upcycle.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides or [])

    command_line = shlex.join(["upcycle", "run", str(recipe), *(overrides or [])])
    stopping.advise(
        lambda: (
            "finished stages and training states are kept; go on with: "
            + shlex.join([*launcher(), *shlex.split(command_line)[1:]])
        )
    )

    from upcycle.cli.comparison import print_comparison
    from upcycle.pipeline import run
    from upcycle.pipeline.runner import join
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
    console.print(f"report   {result.layout.report / 'report.html'}")
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
