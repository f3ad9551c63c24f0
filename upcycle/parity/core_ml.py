"""Apple's Core ML runtime, where there is one: on a Mac. It runs chunks one after the other."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upcycle.export.quiet import quiet_coremltools
from upcycle.parity.feeding import Runner
from upcycle.program.chunked import chunk_paths, numbered
from upcycle.program.graph import Graph
from upcycle.program.reading import read_graph
from upcycle.program.signature import DECODE, HIDDEN, NEW_HIDDEN


def has_core_ml() -> bool:
    """Whether this machine can run a Core ML program."""
    return platform.system() == "Darwin"


class CoreMLRunner:
    """The decoding function of a package in Core ML, on whatever units it chooses.

    Args:
        package: the `.mlpackage`.
        stateful: whether the program has states.
    """

    def __init__(self, package: Path, *, stateful: bool) -> None:
        with quiet_coremltools():
            import coremltools as ct

            self._model: Any = ct.models.MLModel(str(package))
        self._stateful = stateful
        self._state: Any = None
        self.reset()

    def reset(self) -> None:
        """Begin with empty states."""
        self._state = self._model.make_state() if self._stateful else None

    def run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predict."""
        assert name == DECODE
        arrays = {
            key: value.half().numpy() if value.is_floating_point() else value.numpy()
            for key, value in inputs.items()
        }
        found = self._model.predict(arrays, state=self._state)
        return {key: torch.from_numpy(np.asarray(value)).float() for key, value in found.items()}

    def state(self, name: str) -> Tensor:
        """The content of a state."""
        return torch.from_numpy(np.asarray(self._state.read_state(name)))


def core_ml_runner(output: Path) -> Runner:
    """Apple's runtime for a package or a folder of chunks.

    Raises:
        ExportError: a package is missing or damaged.
    """
    graphs = {path: read_graph(path) for path in chunk_paths(output)}
    runners = [
        CoreMLRunner(path, stateful=bool(graph.decode.states)) for path, graph in graphs.items()
    ]
    return runners[0] if output in graphs else Chain(runners, list(graphs.values()))


class Chain:
    """The packages of a chunked export, each with a runner of its own, as one program.

    Args:
        runners: of the chunks, in order.
        graphs: of the chunks.
    """

    def __init__(self, runners: Sequence[Runner], graphs: Sequence[Graph]) -> None:
        self._chunks = list(zip(runners, graphs, strict=True))

    def run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call a function of all chunks; the outputs of all are together."""
        found: dict[str, Tensor] = {}
        for runner, graph in self._chunks:
            given = {**inputs, **found}
            if NEW_HIDDEN in found:
                given[HIDDEN] = found.pop(NEW_HIDDEN)
            found |= runner.run(name, {key: given[key] for key in graph.functions[name].inputs})
        return found

    def reset(self) -> None:
        """Empty the states."""
        for runner, _ in self._chunks:
            runner.reset()

    def state(self, name: str) -> Tensor:
        """The content of a state, which is named as among those of all chunks."""
        runner, own = next(
            (runner, own)
            for number, (runner, graph) in enumerate(self._chunks, start=1)
            for own in graph.decode.states
            if numbered(own, number) == name
        )
        return runner.state(own)
