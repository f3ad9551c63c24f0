"""A package of `upcycle export`, and what it gives for the tokens of a check."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.export.graph import Graph, read_graph
from upcycle.export.interpreter.prepare import Loaded
from upcycle.export.parity.feeding import Feed, Runner
from upcycle.export.signature import DECODE
from upcycle.export.traffic import METADATA_KEY

END = 16  # tokens checked at the end of the context


@dataclass(frozen=True)
class Program:
    """A package.

    Attributes:
        package: its path.
        graph: of all functions.
        loaded: the same, ready to be interpreted.
        manifest: what `upcycle export` noted in it.
    """

    package: Path
    graph: Graph
    loaded: Loaded
    manifest: Mapping[str, Any]

    @classmethod
    def read(cls, package: Path) -> "Program":
        """Read a package's graph.

        Raises:
            ExportError: it is damaged, or `upcycle export` did not make it.
        """
        graph = read_graph(package)
        if METADATA_KEY not in graph.metadata:
            raise ExportError(
                f"{package} was not made by `upcycle export`, so its inputs are not known",
                where=f"its metadata, key {METADATA_KEY!r}",
                fix="export the checkpoint with `upcycle export`",
            )
        return cls(package, graph, Loaded(graph), json.loads(graph.metadata[METADATA_KEY]))

    @property
    def context(self) -> int:
        """C, the positions that the cache holds."""
        return int(self.manifest["options"]["context"])

    @property
    def end(self) -> int:
        """The position where the tokens at the end of the context begin."""
        return self.context - END

    def only_decode(self) -> "Program":
        """The same without its other functions."""
        functions = {DECODE: self.graph.functions[DECODE]}
        return replace(self, graph=replace(self.graph, functions=functions))


@dataclass(frozen=True)
class Outputs:
    """What a program gave.

    Attributes:
        text: logits [N, vocabulary], the first tokens through `prefill` where there is one.
        end: logits [16, vocabulary] of the first tokens again, at the end of the context.
        decoded: logits [P, vocabulary] of the prefilled tokens, decoded one by one instead.
        caches: how far K and V are apart after the one and the other, [P] by position, as a part of
            their largest magnitude.
    """

    text: Tensor
    end: Tensor
    decoded: Tensor | None
    caches: Tensor | None

    @property
    def prefilled(self) -> int:
        """P, tokens that went through `prefill`."""
        return 0 if self.decoded is None else len(self.decoded)


def run_program(program: Program, runner: Runner, tokens: Tensor) -> Outputs:
    """Feed tokens [N] to a program: half through `prefill` where it has one, the rest to decode.

    Args:
        program: the package.
        runner: runs it; its states are emptied.
        tokens: at most as many as the context holds.
    """

    def feed(start: int = 0) -> Feed:
        runner.reset()
        return Feed(runner, program.graph, program.manifest, start)

    end = feed(program.end).decode(tokens[:END])
    first = feed()
    size = first.prefill_size
    if size is None or size > len(tokens):
        return Outputs(first.decode(tokens), end, None, None)
    whole = max(1, len(tokens) // 2 // size) * size
    prefilled = first.prefill(tokens[:whole])
    caches = first.caches()
    rest = tokens[whole:]
    text = torch.cat([prefilled, first.decode(rest)]) if len(rest) else prefilled
    second = feed()
    decoded = second.decode(tokens[:whole])
    return Outputs(text, end, decoded, _difference(caches, second.caches()))


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    apart = [
        (one[name] - other[name]).abs().amax((0, 1, 3)) / one[name].abs().max() for name in one
    ]
    return torch.stack(apart).amax(0)
