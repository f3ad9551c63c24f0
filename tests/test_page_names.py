"""Every path, name, command, option and recipe key that the pages mention exists."""

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from tests.pages import PAGES, ROOT, Page, read_page
from upcycle.cli.app import COMMANDS, app
from upcycle.recipe.schema import Recipe

EVERY_PAGE = pytest.mark.parametrize(
    "page", [read_page(path) for path in PAGES], ids=lambda page: page.path.name
)
REPOSITORY = re.compile(r"(?<![\w/.-])(?:upcycle|scripts|tests|recipes|docs|\.ci)/[\w./<>*-]*\w\b")
DOTTED = re.compile(r"(?<![\w./-])upcycle(?:\.\w+)+")
RECIPE_KEY = re.compile(r"^(?:convert|train|evaluate|export)(?:\.[a-z_]+)+$")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
IDENTIFIER = re.compile(r"^(?:[a-z]+_\w+|[A-Z]\w*[a-z]\w*|[A-Z]+_?[A-Z_]+)$")
OF_OTHERS = {"LanguageModel"}  # a class of swift-transformers
FILES_OF_RESULTS = {"upcycle.json"}


@cache
def cli() -> Any:
    for name in COMMANDS:
        importlib.import_module(f"upcycle.cli.{name.replace('-', '_')}")
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words after `upcycle` name, and the rest of them."""
    command = cli()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"upcycle has no command {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_of(command: Any) -> set[str]:
    options = {"--help"}
    for parameter in command.params:
        options |= {*parameter.opts, *parameter.secondary_opts}
    return options


@cache
def every_option() -> set[str]:
    found: set[str] = set()
    left = [cli()]
    while left:
        command = left.pop()
        found |= options_of(command)
        left += getattr(command, "commands", {}).values()
    for path in (ROOT / "scripts").iterdir():
        if path.is_file():
            found |= set(OPTION.findall(path.read_text(encoding="utf-8")))
    return found


@cache
def entry_point_groups() -> set[str]:
    """The groups that registries read."""
    found = set()
    for path in (ROOT / "upcycle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "Registry" in ast.unparse(node.func):
                texts = [*node.args, *(keyword.value for keyword in node.keywords)]
                found |= {text.value for text in texts if isinstance(text, ast.Constant)}
    return found


@cache
def words_of_the_code() -> set[str]:
    found: set[str] = set()
    for folder in ("upcycle", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__):
                found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


def resolve(dotted: str) -> Any:
    """What a dotted name stands for."""
    parts = dotted.split(".")
    found = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:index]))
        found = getattr(found, part)
    return found


def check_recipe_key(keys: list[str]) -> None:
    """The keys lead through the recipe's sections."""
    section: type[BaseModel] = Recipe
    for index, key in enumerate(keys):
        assert key in section.model_fields, ".".join(keys[: index + 1])
        inner = [
            each
            for each in _types(section.model_fields[key].annotation)
            if isinstance(each, type) and issubclass(each, BaseModel)
        ]
        if not inner:
            return
        (section,) = inner


def _types(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation, *(each for argument in arguments for each in _types(argument))]


def commands_in(page: Page) -> list[tuple[str, bool]]:
    """Commands of `upcycle`, and whether they are to be taken as they stand."""
    found = []
    for language, block in page.blocks:
        for line in block.splitlines():
            line = line.strip().removeprefix("$ ")
            if language in ("", "sh") and line.startswith("upcycle "):
                found.append((line, True))
    for span in page.spans:
        _, _, started = span.partition("-m upcycle ")
        if started:
            found.append((f"upcycle {started}", False))
        elif span.startswith("upcycle "):
            found.append((span, False))
        elif span.split()[0] in COMMANDS and OPTION.search(span):
            found.append((f"upcycle {span}", False))
    return found


@EVERY_PAGE
def test_commands_and_their_options_exist(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line, whole in commands_in(page):
        command, rest = command_of(shlex.split(line, comments=True)[1:])
        if whole:
            command.make_context(command.name, rest)
        unknown = set(OPTION.findall(" ".join(rest))) - options_of(command)
        assert not unknown, f"{line}: {unknown}"


@EVERY_PAGE
def test_options_named_alone_exist(page: Page) -> None:
    alone = {OPTION.match(span) for span in page.spans} - {None}
    assert {found.group() for found in alone if found} <= every_option()


@EVERY_PAGE
def test_scripts_take_the_options_that_are_named(page: Page) -> None:
    for code in page.code:
        for line in code.splitlines():
            for path, options in re.findall(r"(?<![\w/])(scripts/[\w.]+)((?: [^\s#|]+)*)", line):
                text = (ROOT / path).read_text(encoding="utf-8")
                for option in OPTION.findall(options):
                    assert option in text, f"{path} {option}"


@EVERY_PAGE
def test_paths_exist(page: Page) -> None:
    for code in page.code:
        for path in REPOSITORY.findall(code):
            assert list(ROOT.glob(re.sub(r"<\w+>", "*", path))), path


@EVERY_PAGE
def test_dotted_names_exist(page: Page) -> None:
    for code in page.code:
        for dotted in DOTTED.findall(code):
            if dotted not in FILES_OF_RESULTS | entry_point_groups():
                resolve(dotted)


@EVERY_PAGE
def test_identifiers_are_words_of_the_code(page: Page) -> None:
    known = words_of_the_code() | OF_OTHERS
    known |= {word for _, block in page.blocks for word in re.findall(r"\w+", block)}
    named = {span.partition("(")[0] for span in page.spans}
    assert not {name for name in named if IDENTIFIER.match(name)} - known


@EVERY_PAGE
def test_imports_in_examples_exist(page: Page) -> None:
    for _, block in page.blocks:
        for module, names in re.findall(r"from (upcycle[\w.]*) import ([\w, ]+)", block):
            for name in names.split(","):
                resolve(f"{module}.{name.split(' as ')[0].strip()}")


@EVERY_PAGE
def test_recipe_keys_exist(page: Page) -> None:
    for span in page.spans:
        if RECIPE_KEY.match(span):
            check_recipe_key(span.split("."))
    left: list[tuple[list[str], Any]] = [
        ([], yaml.safe_load(block)) for language, block in page.blocks if language == "yaml"
    ]
    while left:
        keys, value = left.pop()
        if keys:
            check_recipe_key(keys)
        if isinstance(value, dict):
            left += [([*keys, key], inner) for key, inner in value.items()]


@EVERY_PAGE
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), link
        if anchor:
            names = {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                for heading in read_page(path).headings
            }
            assert anchor in names, link


def test_what_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="no command"):
        command_of(["transmogrify", "SRC"])
    with pytest.raises(AssertionError, match=r"train\.data\.colour"):
        check_recipe_key(["train", "data", "colour"])
    with pytest.raises(ModuleNotFoundError):
        resolve("upcycle.evaluation.transmogrify")
    assert "--transmogrify" not in every_option()
