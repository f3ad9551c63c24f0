"""Training states on disk: published whole, checked when read, rotated only afterwards.

A state is the fp32 masters of the trained weights, AdamW's moments, and the facts that a resumed
run must share. There is no loader or random state: rows and rates are functions of the step.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, NonNegativeInt, ValidationError

from upcycle.checkpoint.files import under_utf8_name
from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.staging import staged
from upcycle.errors import OutputError, TrainingError
from upcycle.training.facts import Change, RunFacts
from upcycle.training.log import LOG_NAME, is_log
from upcycle.utf8 import to_json

if TYPE_CHECKING:
    import torch
    from torch import nn

_WEIGHTS, _MOMENTS, _STATE = "weights.safetensors", "moments.safetensors", "state.json"
_PREFIX = "step-"


class TrainingState(BaseModel, frozen=True, strict=True):
    """What `state.json` holds.

    Attributes:
        step: optimiser steps done.
        facts: what the run that wrote it was about.
        changes: what that run had changed at its resumptions.
        files: the hash of every other file of the state.
    """

    step: NonNegativeInt
    facts: RunFacts
    changes: list[Change] = []
    files: dict[str, str]


@dataclass(frozen=True)
class FoundState:
    """The newest complete state.

    Attributes:
        folder: where it lies.
        state: what it holds, its tensors apart.
        notes: newer states that were passed over, and why.
    """

    folder: Path
    state: TrainingState
    notes: tuple[str, ...]


def save_state(
    work: Path,
    *,
    step: int,
    trainable: "Mapping[str, nn.Parameter]",
    optimizer: "torch.optim.Optimizer",
    facts: RunFacts,
    changes: Sequence[Change],
    keep_last: int | None,
) -> None:
    """Publish the state after `step` steps, then remove all but the newest `keep_last`, if any.

    Raises:
        OutputError: it cannot be written.
    """
    from safetensors.torch import save_file

    moments = {
        f"{name}/{key}": value.contiguous()
        for name, parameter in trainable.items()
        for key, value in optimizer.state[parameter].items()
    }
    output = work / f"{_PREFIX}{step}"
    if output in state_folders(work):  # a damaged one, which was passed over
        shutil.rmtree(output)
    with staged(output) as folder:
        weights = {name: p.detach().contiguous() for name, p in trainable.items()}
        with under_utf8_name(folder) as named:
            save_file(weights, named / _WEIGHTS)
            save_file(moments, named / _MOMENTS)
        files = {name: hash_file(folder / name) for name in (_WEIGHTS, _MOMENTS)}
        state = TrainingState(step=step, facts=facts, changes=[*changes], files=files)
        text = to_json(state.model_dump(), indent=1) + "\n"
        (folder / _STATE).write_text(text, encoding="utf-8")
    for old in [] if keep_last is None else state_folders(work)[keep_last:]:
        shutil.rmtree(old)


def state_folders(work: Path) -> list[Path]:
    """Published states, newest first."""
    folders = [
        path
        for path in work.glob(f"{_PREFIX}*")
        if path.is_dir() and path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The optimiser steps that a state's folder is named after."""
    return int(folder.name.removeprefix(_PREFIX))


def remove_unfinished(work: Path) -> None:
    """Remove what a killed run had not finished saving."""
    for path in work.glob(f".{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def find_state(work: Path) -> FoundState | None:
    """The newest state whose files are what was written; damaged ones are passed over.

    Raises:
        TrainingError: there are states, and each is damaged.
    """
    notes = []
    for folder in state_folders(work):
        try:
            state = _read(folder)
            damaged = [
                name
                for name in (_WEIGHTS, _MOMENTS)
                if hash_file(folder / name) != state.files.get(name)
            ]
        except (OSError, ValidationError) as error:
            notes.append(f"{folder.name} is incomplete ({type(error).__name__}): passed over")
            continue
        if not damaged:
            return FoundState(folder, state, tuple(notes))
        notes.append(f"{folder.name} is damaged ({', '.join(damaged)}): passed over")
    if notes:
        raise TrainingError(
            f"no training state can be read: {'; '.join(notes)}",
            where=str(work),
            fix="remove the folder to train from the beginning",
        )
    return None


def _read(folder: Path) -> TrainingState:
    return TrainingState.model_validate_json((folder / _STATE).read_bytes())


def newest_facts(work: Path) -> RunFacts | None:
    """The facts of the newest state, whose files are not read; None where there is no state.

    Raises:
        TrainingError: no state can be read.
    """
    for folder in state_folders(work):
        with suppress(OSError, ValidationError):
            return _read(folder).facts
    find_state(work)
    return None


def check_work(work: Path) -> None:
    """Refuse a training folder whose log no run wrote: it would be written over.

    Raises:
        OutputError: it holds such a log, and no state that a run could go on from.
    """
    log = work / LOG_NAME
    if log.exists() and not (is_log(log) or state_folders(work)):
        raise OutputError(
            f"{log} was not made by upcycle",
            where=str(log),
            fix="choose another output, or move the file elsewhere",
        )


def load_state(
    found: FoundState, trainable: "Mapping[str, nn.Parameter]", optimizer: "torch.optim.Optimizer"
) -> None:
    """Put a state's weights and moments back, in place."""
    import torch
    from safetensors.torch import load_file

    with under_utf8_name(found.folder) as named:
        weights, stored = load_file(named / _WEIGHTS), load_file(named / _MOMENTS)
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    for key, value in stored.items():
        name, _, moment = key.rpartition("/")
        parameter = trainable[name]
        optimizer.state[parameter][moment] = value.to(parameter.device)
