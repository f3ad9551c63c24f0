"""`upcycle train`: uptrain the converted checkpoint of a recipe."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Overwrite
from upcycle.cli.console import Console, Outcome, command
from upcycle.errors import RecipeError
from upcycle.recipe.loading import load_recipe

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A .yaml or .py recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values instead of the recipe's."),
]


@command("train", together=True, epilog="Example: upcycle train recipes/demo.yaml train.steps=20")
def train_command(
    console: Console,
    recipe_file: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete training state.")
    ] = False,
    overwrite: Overwrite = False,
) -> Outcome:
    """Uptrain OUTPUT/converted towards the recipe's source, into OUTPUT/uptrained.

    For several processes: torchrun --nproc-per-node N -m upcycle train RECIPE
    """
    recipe = load_recipe(recipe_file, overrides or ())
    if recipe.train is None:
        raise RecipeError(
            "the recipe has no train section", where=str(recipe_file), fix="add one to train"
        )
    from upcycle.pipeline.training import train

    with console.progress() as watch:
        result = train(recipe, resume=resume, overwrite=overwrite, watch=watch)
    if result is None:
        return Outcome({})
    for note in result.notes:
        console.print(note)
    console.table(
        ("held-out, nats per token", "before", "after"),
        [
            ("NLL", *(f"{value:.4f}" for value in result.heldout_nll)),
            ("KL(source || model)", *(f"{value:.4f}" for value in result.heldout_kl)),
        ],
    )
    console.print(
        f"{result.steps} steps, {result.tokens:,} tokens, "
        f"{result.tokens_per_second:,.0f} tokens/s; "
        f"{result.stored_moved:.1%} of the stored weights moved"
    )
    console.print(f"checkpoint  {result.output}")
    console.print(f"log         {result.log}")
    return Outcome({**asdict(result), "output": str(result.output), "log": str(result.log)})
