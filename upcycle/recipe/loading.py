"""From a recipe file and command-line overrides to a checked `Recipe`.

Every problem is reported at once, each with its file, line and key.
"""

import importlib.util
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from upcycle.checkpoint.hub import is_hub_id
from upcycle.errors import RecipeError, UpcycleError
from upcycle.options.base import TEXT_WORDS, PathValue, section_in
from upcycle.options.stage import gathered
from upcycle.recipe.problems import problems_of
from upcycle.recipe.schema import Recipe
from upcycle.recipe.strict_yaml import Location, Problem, Tree, read_tree
from upcycle.utf8 import shown

_MODELS: tuple[Location, ...] = (("source",), ("train", "teacher"))  # may be Hub ids
_SCHEME: Location = ("export", "quantize")  # may be a preset's name


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Paths inside a file are relative to the file, those in overrides to the current folder.

    Args:
        path: a .yaml file, or a .py file that defines `recipe() -> Recipe`.
        overrides: `section.key=value` strings, the value in YAML.

    Raises:
        RecipeError: with every problem found, each with file, line and key.
    """
    path = Path(path)
    if not os.path.isfile(path):  # false of a name that no file can have
        raise RecipeError(
            f"there is no recipe {path}", where=str(path), fix="name a .yaml or .py file"
        )
    if path.suffix == ".py":
        value, where, problems = _python_value(path), Tree("", path.name).where, list[Problem]()
    else:
        tree = read_tree(path)
        value, where, problems = tree.value, tree.where, tree.problems
        if not problems and not isinstance(value, dict):
            problems.append(Problem(path.name, "must be a mapping with source, output, convert, …"))
    if not isinstance(value, dict):
        raise _failure(path, problems)
    origins: dict[Location, str] = {}

    def place(location: Location) -> str:
        for length in range(len(location), 0, -1):
            if location[:length] in origins:
                return origins[location[:length]]
        return where(location)

    problems += _resolve_paths(value, path.parent.resolve(), place)
    for override in overrides:
        problems += _apply(value, override, origins)
    try:
        with gathered():
            recipe = Recipe.model_validate(value)
    except ValidationError as error:
        problems += problems_of(error, Recipe, place)
        raise _failure(path, problems) from error
    if problems:
        raise _failure(path, problems)
    return recipe


def _failure(path: Path, problems: Sequence[Problem]) -> RecipeError:
    if len(problems) == 1:
        return RecipeError(
            problems[0].what, where=problems[0].where, fix="mend this key, then run again"
        )
    return RecipeError(
        f"{len(problems)} problems in {path.name}",
        where=str(path),
        fix="mend each key named above, then run again",
        details=[str(problem) for problem in problems],
    )


def _python_value(path: Path) -> dict[str, Any]:
    """Run a `.py` recipe and take its `recipe()` apart again, so that overrides can reach it."""
    spec = importlib.util.spec_from_file_location(f"_upcycle_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    try:
        with gathered():
            spec.loader.exec_module(module)
            recipe = module.recipe()
    except ValidationError as error:
        raise _failure(path, problems_of(error, Recipe, Tree("", path.name).where)) from error
    except UpcycleError:
        raise
    # A recipe's code is the user's: whatever it raises, and sys.exit too, is theirs to mend.
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"the recipe cannot be run: {type(error).__name__}: {' '.join(str(error).split())}",
            where=_line_of(error, path),
            fix="define `recipe() -> upcycle.recipe.schema.Recipe` in it",
        ) from error
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"recipe() returned {type(recipe).__name__}",
            where=str(path),
            fix="return an upcycle.recipe.schema.Recipe",
        )
    return recipe.model_dump(mode="json", exclude_unset=True)


def _line_of(error: BaseException, path: Path) -> str:
    """The file, and the line in it that raised, where one did."""
    name = os.path.abspath(path)  # as the import machinery names it
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == name]
    if isinstance(error, SyntaxError) and error.filename == name:
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else str(path)


def _apply(value: dict[str, Any], override: str, origins: dict[Location, str]) -> list[Problem]:
    """Set one dotted key; what cannot be set is returned as problems."""
    name = f"override {override!r}"
    key, equals, text = override.partition("=")
    if not (key and equals):
        return [Problem(name, "must be section.key=value")]
    given: Any = text
    if shown(text) == text:  # else bytes of a path, which YAML cannot have
        tree = Tree(text, name)
        if tree.problems:
            return tree.problems
        given = tree.value
    location: Location = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    node: Any = value
    for part in location[:-1]:
        if isinstance(node, list):
            if not (isinstance(part, int) and part < len(node)):
                return [Problem(name, f"there is no item {part} among {len(node)}")]
            node = node[part]
        elif isinstance(node, dict):
            if node.get(str(part)) is None:
                node[str(part)] = {}
            node = node[str(part)]
        else:
            return [Problem(name, f"{part!r} lies below a plain value")]
    last = location[-1]
    if isinstance(node, dict):
        node[str(last)] = given
        location = (*location[:-1], str(last))
    elif isinstance(node, list) and isinstance(last, int) and last < len(node):
        node[last] = given
    else:
        return [Problem(name, f"{last!r} is no key or item here")]
    origins[location] = name
    return _resolve_paths(value, Path.cwd(), lambda _: name, below=location)


def _resolve_paths(
    value: dict[str, Any], folder: Path, place: Callable[[Location], str], below: Location = ()
) -> list[Problem]:
    """Make the paths at or below a location absolute, in place. Values of a wrong type stay.

    Returns:
        Those that no file system has.
    """
    problems = []
    for container, key, location in _path_slots(value, Recipe):
        is_below = location[: len(below)] == below
        if is_below and isinstance(container[key], str):
            text = container[key]
            try:
                absolute = (folder / Path(text).expanduser()).resolve()
                names_a_model = not absolute.exists() and location in _MODELS
            # A null character, an unknown user's home, or a name that is too long.
            except (ValueError, RuntimeError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                problems.append(Problem(place(location), f"no path can be {text!r}: {reason}"))
                continue
            if not (names_a_model and is_hub_id(text)):
                container[key] = str(absolute)
    return problems


def _path_slots(
    node: Any, section: type[BaseModel], above: Location = ()
) -> Iterator[tuple[Any, Any, Location]]:
    """Where a part of a recipe holds paths: container, key in it, and location."""
    for key, field in section.model_fields.items():
        if not isinstance(node, dict) or key not in node:
            continue
        value, location, below = node[key], (*above, key), section_in(field.annotation)
        is_scheme = location == _SCHEME and str(value).endswith((".yaml", ".yml"))
        if field.annotation is Path or location in _MODELS or is_scheme:
            yield node, key, location
        elif PathValue in get_args(field.annotation) and isinstance(value, list):
            for index, text in enumerate(value):
                if text not in TEXT_WORDS:
                    yield value, index, (*location, index)
        elif below is not None and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, str):  # a bare path
                    yield value, index, (*location, index)
                yield from _path_slots(item, below, (*location, index))
        elif below is not None:
            yield from _path_slots(value, below, location)
