"""The YAML subset: no surprising scalars, no key twice, a line for every value."""

from typing import Any

import pytest

from upcycle.recipe.strict_yaml import Tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-3", 1e-3),
        ("-2E+3", -2000.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("007", "007"),
        ("'5'", "5"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("[1, {a: 2}]", [1, {"a": 2}]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    tree = Tree(text, "t")
    assert tree.problems == []
    assert tree.value == value
    assert type(tree.value) is type(value)


def test_lines() -> None:
    tree = Tree("a: 1\n\nb:\n  - x\n  - c: 3\n", "t.yaml")
    assert tree.where(("a",)) == "t.yaml:1: a"
    assert tree.where(("b", 1, "c")) == "t.yaml:5: b.1.c"
    assert tree.where(("b", 1, "absent")) == "t.yaml:5: b.1.absent"
    assert tree.where(("nowhere",)) == "t.yaml: nowhere"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "t:3: a: given twice; the first is on line 1"),
        ("a: {b: 1, b: 2}", "t:1: a.b: given twice; the first is on line 1"),
        ("a: &x [*x]", "t:1: a.0: an alias that contains itself"),
        ("a: 1\nb: [", "t:2: not valid YAML"),
        ("a: b: c", "t:1: not valid YAML"),
        ("a: \x00", "t: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "t:2: not valid YAML"),
        ("b: 1\na: !!int ''", "t:2: a: '' is no int"),
        ("a: !!bool foo", "t:1: a: 'foo' is no bool"),
        ("a: [!!timestamp foo]", "t:1: a.0: 'foo' is no timestamp"),
        ("[" * 3000, "t: not valid YAML: nested too deep"),
    ],
)
def test_problems(text: str, problem: str) -> None:
    (found,) = Tree(text, "t").problems
    assert str(found).startswith(problem)


def test_an_anchor_is_a_copy() -> None:
    assert Tree("a: &x {n: 1}\nb: *x\n", "t").value == {"a": {"n": 1}, "b": {"n": 1}}
