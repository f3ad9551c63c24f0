"""The example of every `--help` is a command that this program takes."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from upcycle.cli.app import COMMANDS, app
from upcycle.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module(f"upcycle.cli.{name.replace('-', '_')}")
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    label, _, example = command.epilog.partition(": ")
    assert label == "Example"
    words = shlex.split(example)
    assert words[:2] == ["upcycle", name]
    monkeypatch.chdir(ROOT)
    context = command.make_context(name, words[2:])
    for word in words[2:]:
        if word.startswith("recipes/"):
            assert (ROOT / word).exists(), word
    recipe = context.params.get("recipe_file") or context.params.get("recipe")
    if recipe is not None:
        load_recipe(recipe, context.params.get("overrides") or ())
