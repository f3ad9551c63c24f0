"""Apple's own runtime, where there is one: on a Mac."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upcycle.export.quiet import quiet_coremltools
from upcycle.program.signature import DECODE


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
