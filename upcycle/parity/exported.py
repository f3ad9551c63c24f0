"""A package of `upcycle export`, and what it gives for the tokens of a check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.interpreter.prepare import Loaded
from upcycle.parity.feeding import Feed, Runner
from upcycle.parity.interface import check_interface
from upcycle.program.chunked import check_hashes, read_exported
from upcycle.program.graph import Graph
from upcycle.program.noted import ExportManifest, required_manifest
from upcycle.program.signature import DECODE, INPUT_IDS, LOGITS, PREFILL

END = 16  # tokens checked at the end of the context


@dataclass(frozen=True)
class Exported:
    """What `upcycle export` made, for whatever runtime.

    Attributes:
        path: of the package or asset.
        graph: of all functions.
        manifest: what `upcycle export` noted in it.
    """

    path: Path
    graph: Graph
    manifest: ExportManifest

    @property
    def context(self) -> int:
        """C, the positions that the cache holds."""
        return self.manifest.options.context

    @property
    def end(self) -> int:
        """The position where the tokens at the end of the context begin."""
        return self.context - END

    @property
    def prefill_size(self) -> int | None:
        """T, the tokens per call of `prefill`; None where there is only decoding."""
        function = self.graph.functions.get(PREFILL)
        return function.types[INPUT_IDS].shape[1] if function else None

    @property
    def vocabulary(self) -> int | None:
        """How many logits a token has."""
        decode = self.graph.functions[DECODE]
        # Core AI's values have no names; its logits come first but for the tokens of states.
        unnamed = (name for name in decode.outputs if decode.types[name].elements)
        return decode.types[LOGITS if LOGITS in decode.outputs else next(unnamed)].shape[-1]

    def only_decode(self) -> Self:
        """The same without its other functions."""
        functions = {DECODE: self.graph.functions[DECODE]}
        return replace(self, graph=replace(self.graph, functions=functions))


@dataclass(frozen=True)
class Program(Exported):
    """A Core ML package, or a folder of chunks as one, ready to be interpreted.

    Attributes:
        loaded: its functions.
    """

    loaded: Loaded

    @classmethod
    def read(cls, package: Path) -> "Program":
        """Read the graph of a package or of a folder of chunks.

        Raises:
            CheckpointError: the manifest of the folder, or of the one beside it, is damaged.
            ExportError: it is damaged, is one of several chunks, is not what its folder notes, or
                `upcycle export` did not make it.
        """
        graph = read_exported(package)
        manifest = required_manifest(graph, package)
        chunk = manifest.result.chunk
        if chunk is not None:
            raise ExportError(
                f"{package.name} is one of {chunk.of} chunks of a model",
                where=str(package),
                fix=f"name their folder, {package.absolute().parent}",
            )
        check_interface(graph, manifest, str(package))
        check_hashes(package)
        return cls(package, graph, manifest, Loaded(graph))


@dataclass(frozen=True)
class ProgramOutputs:
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


def text_length(programs: Sequence[Exported], tokens: int) -> int:
    """How many tokens of text to check programs on: `tokens` of prefill and as many of decoding.

    They are more where a call of `prefill` takes more, but no more than each context holds.
    """
    prefilled = max(tokens, *(program.prefill_size or 0 for program in programs))
    return min(prefilled + tokens, *(program.context for program in programs))


def run_program(program: Exported, runner: Runner, tokens: Tensor) -> ProgramOutputs:
    """Feed tokens [N] to a program: half through `prefill` where it has one, the rest to decode.

    Args:
        program: what to feed.
        runner: runs it; its states are emptied.
        tokens: of `text_length`.
    """

    def feed(start: int = 0) -> Feed:
        runner.reset()
        return Feed(runner, program.graph, program.manifest, start)

    end = feed(program.end).decode(tokens[:END])
    first = feed()
    size = program.prefill_size
    if size is None:
        return ProgramOutputs(first.decode(tokens), end, None, None)
    whole = max(1, len(tokens) // 2 // size) * size
    prefilled = first.prefill(tokens[:whole], size)
    caches = first.caches()
    rest = tokens[whole:]
    text = torch.cat([prefilled, first.decode(rest)]) if len(rest) else prefilled
    second = feed()
    decoded = second.decode(tokens[:whole])
    return ProgramOutputs(text, end, decoded, _difference(caches, second.caches()))


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    apart = [
        (one[name] - other[name]).abs().amax((0, 1, 3)) / one[name].abs().max() for name in one
    ]
    return torch.stack(apart).amax(0)
