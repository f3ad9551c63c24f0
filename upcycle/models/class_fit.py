"""Compare a checkpoint's names and shapes with transformers' class, before any weight is read.

The class is built on the "meta" device and given tensors without data, by transformers' own
loading: its renamings, fusions of experts, ties and tolerated names all count. Importing
transformers takes seconds and memory, so a process that has not done so yet leaves it to a child
that works beside it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from upcycle.checkpoint.naming import kind_of
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError

_SHOWN = 3
Shapes = Mapping[str, Sequence[int]]
Known = Callable[[str], bool]


@dataclass(frozen=True)
class ClassFit:
    """How a checkpoint fits its class.

    Attributes:
        model_class: the class of transformers; None where it makes none of the configuration.
        transformers: its version.
        refused: what it says where it refuses the configuration.
        missing: shapes by name of what the class has and the checkpoint lacks.
        unexpected: shapes by name of what the checkpoint has and the class would ignore; empty
            where transformers renames it.
        mismatched: the shapes in the checkpoint and in the class, by name.
        unjoined: shapes by name of what the class joins of several tensors that are there, and
            that do not go together.
    """

    model_class: str | None
    transformers: str
    refused: str | None
    missing: Mapping[str, Sequence[int]]
    unexpected: Mapping[str, Sequence[int]]
    mismatched: Mapping[str, Sequence[Sequence[int]]]
    unjoined: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Whether every number of the class comes from the checkpoint."""
        return not (self.refused or self.missing or self.mismatched or self.unjoined)

    @property
    def warnings(self) -> list[str]:
        """What is wrong, a line for each kind; empty where all fits."""
        name = f"{self.model_class} of transformers {self.transformers}"
        found = [] if self.refused is None else [self.refused]
        if self.missing:
            names = [f"{key} {list(shape)}" for key, shape in self.missing.items()]
            found.append(f"{name}: {len(names)} missing, which loading fills with random numbers: ")
            found[-1] += _listed(names)
        if self.unjoined:
            names = [f"{key} {list(shape)}" for key, shape in self.unjoined.items()]
            found.append(
                f"{name}: {len(names)} that loading cannot join from the tensors that are there, "
                "such as experts of unequal sizes, and fills with random numbers: "
                f"{_listed(names)}"
            )
        if self.mismatched:
            names = [
                f"{key} is {list(here)}, the class has {list(there)}"
                for key, (here, there) in self.mismatched.items()
            ]
            found.append(f"{name}: {len(names)} mismatched: {_listed(names)}")
        if self.unexpected:
            names = [
                f"{key} {list(shape)}" if shape else key for key, shape in self.unexpected.items()
            ]
            kind = kind_of(self.unexpected)
            hint = f"; {kind[1]} is {kind[0].kind}: {kind[0].fix}" if kind else ""
            found.append(
                f"{name}: {len(names)} unexpected, which loading ignores: {_listed(names)}{hint}"
            )
        return found


def class_fit(checkpoint: Checkpoint, known: Known = lambda name: False) -> ClassFit:
    """Compare a checkpoint with its class in this process.

    Args:
        checkpoint: as the class sees it.
        known: whether a tensor is known to be none of the class's, and that is as it should be.
    """
    return _fit(checkpoint.config, _shapes(checkpoint, known))


@contextmanager
def class_fit_beside(
    checkpoint: Checkpoint, known: Known = lambda name: False, *, here: bool = False
) -> "Iterator[PendingFit]":
    """Compare a checkpoint with its class while other work is done.

    Args:
        checkpoint: as the class sees it.
        known: see `class_fit`.
        here: compare at once, in this process, as one that has imported transformers always does.
    """
    pending = PendingFit(checkpoint, known, here=here or "transformers" in sys.modules)
    try:
        yield pending
    finally:
        pending.close()


class PendingFit:
    """A comparison that may still be under way in a child process."""

    def __init__(self, checkpoint: Checkpoint, known: Known, *, here: bool) -> None:
        self._checkpoint = checkpoint
        self._known = known
        self._found = class_fit(checkpoint, known) if here else None
        self._process = None if here else _start(checkpoint, known)

    def result(self) -> ClassFit:
        """The comparison, waited for."""
        if self._found is None:
            answer = b""
            if self._process is not None and self._process.stdout is not None:
                answer = self._process.stdout.read()
                self._process.wait()
            # A child that could not even start leaves the work to this process.
            self._found = (
                ClassFit(**json.loads(answer))
                if answer
                else class_fit(self._checkpoint, self._known)
            )
        return self._found

    def close(self) -> None:
        """End a child that nobody waits for any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def _start(checkpoint: Checkpoint, known: Known) -> "subprocess.Popen[bytes] | None":
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert process.stdin is not None
        with process.stdin as question:
            asked = {"config": dict(checkpoint.config), "tensors": _shapes(checkpoint, known)}
            question.write(json.dumps(asked).encode())
    except OSError:
        return None
    return process


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    answer = json.dumps(asdict(_fit(asked["config"], asked["tensors"])))
    sys.stdout.write(answer)


def _shapes(checkpoint: Checkpoint, known: Known) -> dict[str, list[int]]:
    return {
        name: list(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
        if not (tensor.is_buffer or known(name))
    }


def _fit(config: Mapping[str, Any], tensors: Shapes) -> ClassFit:
    from upcycle.models.meta_loading import load_without_data

    installed = version("transformers")
    try:
        found = load_without_data(config, tensors)
    except CheckpointError as error:
        return ClassFit(None, installed, error.what, {}, {}, {})
    return ClassFit(transformers=installed, refused=None, **found)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


if __name__ == "__main__":
    _main()
