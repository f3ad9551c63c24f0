"""`upcycle recipe`: what a recipe says in full, and what any may say."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from upcycle.cli.arguments import Overrides
from upcycle.cli.console import Console, Outcome, command
from upcycle.errors import RecipeError
from upcycle.utf8 import to_json


@command("recipe", epilog="Example: upcycle recipe show recipes/demo.yaml")
def recipe_command(
    console: Console,
    what: Annotated[
        Literal["show", "schema"],
        typer.Argument(
            metavar="show|schema",
            help="show: RECIPE with every default and override filled in, in YAML. "
            "schema: the JSON schema of all recipes, for editors.",
        ),
    ],
    recipe_file: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A .yaml or .py recipe.")
    ] = None,
    overrides: Overrides = None,
) -> Outcome:
    """Print a recipe with all its defaults, or the JSON schema that recipes follow."""
    import yaml

    from upcycle.recipe.loading import load_recipe
    from upcycle.recipe.schema import Recipe

    document: dict[str, Any]
    if what == "schema":
        document = Recipe.model_json_schema()
        console.print(to_json(document, indent=2))
        return Outcome(document)
    if recipe_file is None:
        raise RecipeError(
            "no recipe is named",
            where="upcycle recipe show",
            fix="name a .yaml or .py file; `upcycle init DIR --source SRC` writes one",
        )
    document = load_recipe(recipe_file, overrides or ()).model_dump(mode="json")
    console.print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())
    return Outcome(document)
