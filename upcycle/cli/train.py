"""`upcycle train`: uptrain the converted checkpoint of a recipe."""

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from upcycle import stopping
from upcycle.cli.arguments import Overrides, Overwrite, RecipeFile
from upcycle.cli.console import Console, Outcome, command, launcher
from upcycle.errors import RecipeError
from upcycle.recipe.loading import load_recipe


@command(
    "train",
    together=True,
    epilog="Example: upcycle train recipes/demo.yaml train.fraction=0.002",
)
def train_command(
    console: Console,
    recipe_file: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete training state.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change",
            metavar="KEY",
            help="With --resume: this key of the train section may differ from the state's, such "
            "as learning_rate, steps or data; may be repeated.",
        ),
    ] = None,
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
    command_line = ["upcycle", "train", str(recipe_file), *(overrides or ())]
    command_line += ["--overwrite"] if overwrite else []
    again = [*command_line, "--resume"]
    again += [word for key in allow_change or () for word in ("--allow-change", key)]
    stopping.advise(lambda: f"resume with: {shlex.join([*launcher(), *again[1:]])}")

    from upcycle.pipeline.training import train

    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        console.print(line)

    with console.progress() as watch:
        result = train(
            recipe,
            resume=resume,
            allow_change=allow_change or (),
            overwrite=overwrite,
            watch=watch,
            tell=tell,
            command=[*launcher(), *command_line[1:]],
        )
    if result is None:
        return Outcome({})
    for note in result.notes:
        if note not in told:
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
