"""YAML with the line of every value, and without the surprises of YAML 1.1.

`1e-5` is a float, `no` and `12:30` are strings, a key given twice is an error.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from upcycle.errors import RecipeError

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """Something wrong in a recipe.

    Attributes:
        where: file, line and key.
        what: the message, with what would be valid.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def dotted(location: Location) -> str:
    """A location as people write it: `train.data.sources.0.path`."""
    return ".".join(str(part) for part in location)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        (
            r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        [*"-+.0123456789"],
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


class Tree:
    """A parsed document: its values, where each stands, and what was wrong already.

    Attributes:
        value: plain dicts, lists and scalars.
        lines: the 1-based line of every key and list item.
        problems: duplicate keys and the like.
    """

    def __init__(self, text: str, name: str) -> None:
        self.value: Any = None
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._name = name
        try:
            self._loader = _Loader(text)
            node = self._loader.get_single_node()
            if node is not None:
                self.value = self._build(node, (), ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            self.problems.append(Problem(f"{name}:{line}", f"not valid YAML: {error.problem}"))
        except RecursionError:
            self.problems.append(Problem(name, "not valid YAML: nested too deep"))
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            self.problems.append(Problem(name, f"not valid YAML: {reason}"))

    def where(self, location: Location) -> str:
        """File, line and key; the nearest parent's line for a key that is absent."""
        for length in range(len(location), 0, -1):
            if line := self.lines.get(location[:length]):
                return f"{self._name}:{line}: {dotted(location)}"
        return f"{self._name}: {dotted(location)}" if location else self._name

    def _build(self, node: yaml.Node, location: Location, parents: tuple[yaml.Node, ...]) -> Any:
        self.lines.setdefault(location, node.start_mark.line + 1)
        if node in parents:
            self.problems.append(Problem(self.where(location), "an alias that contains itself"))
            return None
        if isinstance(node, yaml.SequenceNode):
            return [
                self._build(child, (*location, index), (*parents, node))
                for index, child in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, location, (*parents, node))
        try:
            return self._loader.construct_object(node)
        except (ValueError, LookupError, AttributeError):  # of a tag that the value does not suit
            kind = node.tag.rpartition(":")[2]
            self.problems.append(Problem(self.where(location), f"{node.value!r} is no {kind}"))
            return None

    def _build_mapping(
        self, node: yaml.MappingNode, location: Location, parents: tuple[yaml.Node, ...]
    ) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            child = (*location, key)
            line = key_node.start_mark.line + 1
            if key in mapping:
                where = f"{self._name}:{line}: {dotted(child)}"
                self.problems.append(
                    Problem(where, f"given twice; the first is on line {self.lines[child]}")
                )
                continue
            self.lines[child] = line
            mapping[key] = self._build(value_node, child, parents)
        return mapping


def read_tree(path: Path) -> Tree:
    """Parse a recipe file.

    Raises:
        RecipeError: it is not UTF-8, so that its paths and prompts would be others.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path.name} is not UTF-8: byte 0x{data[error.start]:02x} on line {line}",
            where=str(path),
            fix="save it as UTF-8",
        ) from error
    return Tree(text, path.name)
