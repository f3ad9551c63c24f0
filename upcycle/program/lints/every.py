"""Run every lint over a package."""

from collections.abc import Iterable, Iterator

from upcycle.program.graph import Graph
from upcycle.program.lints.attention import ATTENTION_LINTS
from upcycle.program.lints.finding import Finding, Found, Lint, PackageLint
from upcycle.program.lints.numbers import NUMBER_LINTS
from upcycle.program.lints.package import PACKAGE_LINTS
from upcycle.program.lints.shapes import SHAPE_LINTS
from upcycle.program.lints.states import STATE_LINTS

FUNCTION_LINTS = (*ATTENTION_LINTS, *STATE_LINTS, *NUMBER_LINTS, *SHAPE_LINTS)
_ORDER = ("error", "warning", "note")


def lint_graph(graph: Graph) -> list[Finding]:
    """Every broken rule, errors first; within a severity in the order of the tables."""
    return sorted(_findings(graph), key=lambda finding: _ORDER.index(finding.severity))


def _findings(graph: Graph) -> Iterator[Finding]:
    for rule in PACKAGE_LINTS:
        yield from _collected(rule, "", rule.check(graph))
    for name, function in graph.functions.items():
        for lint in FUNCTION_LINTS:
            yield from _collected(lint, name, lint.check(function))


def _collected(
    rule: Lint | PackageLint, function: str, found: Iterable[Found]
) -> Iterator[Finding]:
    """One finding for all the places of a rule."""
    places = list(found)
    if places:
        names = tuple(name for name, _ in places)
        yield Finding(rule.name, rule.severity, function, names, places[0][1], rule.fix)
