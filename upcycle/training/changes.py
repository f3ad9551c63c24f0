"""What may differ between a run and its resumption by the user's leave, and what is told of it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from upcycle.errors import TrainingError
from upcycle.options.train import TrainOptions
from upcycle.training.facts import FREE_KEYS
from upcycle.training.state import FoundState
from upcycle.training.step import learning_rate

# By the key that allows a change: the facts that it may change.
_CHANGEABLE: Mapping[str, frozenset[str]] = {
    **{
        key: frozenset({key})
        for key in (
            "betas", "cross_entropy", "distillation", "learning_rate", "max_grad_norm",
            "precision", "rows", "schedule", "seed", "steps", "teacher", "temperature",
            "warmup_steps", "weight_decay",
        )
    },
    "data": frozenset({"data", "rows"}),
    "assistant_only": frozenset({"assistant_only", "rows"}),
}  # fmt: skip
_FIXED = {
    "batch_size": "rows are counted in batches, so that another size would repeat or skip text",
    "sequence_length": "rows of another length are other rows, so that text would repeat or lack",
    "student": "the state holds the weights of the student that the run began with",
    "trainable": "the state holds the moments of the weights that were trained",
}
# Keys inside `train.data`, as a recipe's overrides spell them.
_LONG = {"data.sources": "data", "data.chat.assistant_only": "assistant_only"}
_OF_THE_RATE = {"learning_rate", "schedule", "warmup_steps", "steps"}


@dataclass(frozen=True)
class Change:
    """A fact that differs from some step on.

    Attributes:
        step: optimiser steps done before.
        key: of the fact.
        before: the earlier value.
        after: the value since.
    """

    step: int
    key: str
    before: Any
    after: Any

    def to_dict(self) -> dict[str, Any]:
        """For the log, the states and the manifest."""
        found = asdict(self)
        return {"step": found["step"], "key": self.key, "from": self.before, "to": self.after}

    def __str__(self) -> str:
        if isinstance(self.before, dict) or isinstance(self.after, dict):
            return f"other {self.key} after step {self.step}"
        return f"{self.key} {self.before} → {self.after} after step {self.step}"


def allowed_keys(allow_change: Collection[str]) -> list[str]:
    """Keys that may change, without the name of their section: a recipe's `train.steps` is steps.

    Raises:
        TrainingError: an unknown key, or one that cannot change.
    """
    keys = [_LONG.get(short := key.removeprefix("train."), short) for key in allow_change]
    for key in keys:
        if key in _CHANGEABLE or key in FREE_KEYS:
            continue
        reason = f"{key} cannot change: {_FIXED[key]}" if key in _FIXED else f"there is no {key!r}"
        raise TrainingError(
            reason,
            where="--allow-change",
            fix=f"choose of {', '.join(sorted(_CHANGEABLE))}; "
            f"{', '.join(sorted(FREE_KEYS))} may always change",
        )
    return keys


def changes_since(
    found: FoundState, facts: Mapping[str, Any], allow_change: Collection[str]
) -> list[Change]:
    """What a resumed run does otherwise than the state's.

    Raises:
        TrainingError: naming what differs and was not allowed to, or steps that lie behind.
    """
    changes = [
        Change(found.step, key, found.facts.get(key), facts.get(key))
        for key in _differing(found.facts, facts)
    ]
    allowed = {fact for key in allow_change for fact in _CHANGEABLE.get(key, ())}
    refused = [change for change in changes if change.key not in allowed]
    if refused:
        raise TrainingError(
            "the run cannot be resumed, for it is no longer the same: "
            + "; ".join(f"{c.key} was {c.before!r} and is {c.after!r}" for c in refused),
            where=str(found.folder),
            fix=_way_out({change.key for change in refused}),
        )
    if facts["steps"] < found.step:
        raise TrainingError(
            f"the state is that of step {found.step}, behind the {facts['steps']} steps asked for",
            where=str(found.folder),
            fix=f"give at least {found.step} steps",
        )
    return changes


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The facts that differ, but for those that may and the text, of which the rows decide."""
    keys = {*was, *now} - FREE_KEYS - {"text"}
    return [key for key in sorted(keys) if was.get(key) != now.get(key)]


def keys_to_allow(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The keys by which a run may go on from a state that has other facts than its own."""
    return _allowing(set(_differing(was, now)))


def _allowing(keys: set[str]) -> set[str]:
    if keys <= {"rows"} and keys:
        return {"data"}
    return keys - {"rows"} if keys & {"data", "assistant_only"} else keys


def _way_out(keys: set[str]) -> str:
    fixed = sorted(key for key in keys if key in _FIXED)
    if fixed:
        return (
            f"restore {', '.join(fixed)} ({'; '.join(_FIXED[key] for key in fixed)}), "
            "or remove the training folder to start anew"
        )
    allowing = " ".join(f"--allow-change {key}" for key in sorted(_allowing(keys)))
    return f"restore what changed, or go on with it: --resume {allowing}"


def change_notes(found: FoundState, recipe: TrainOptions, changes: Collection[Change]) -> list[str]:
    """What a changed run does otherwise; the rate too, a function of the step and the recipe."""
    notes = [f"changed: {change}" for change in changes]
    step, facts = found.step, found.facts
    if step >= recipe.num_steps and {change.key for change in changes} - {"steps"}:
        notes.append(f"no step is left to train otherwise: the run has {step}, and all are done")
    if not {change.key for change in changes} & _OF_THE_RATE or step >= recipe.num_steps:
        return notes
    before = recipe.model_copy(
        update={"fraction": None, "source_steps": None, **{k: facts[k] for k in _OF_THE_RATE}}
    )
    last = learning_rate(step - 1, before) if step else 0.0
    rate = (
        f"the learning rate follows {recipe.schedule} over all {recipe.num_steps} steps: it was "
        f"{last:.3g} in step {step} and is {learning_rate(step, recipe):.3g} in step {step + 1}"
    )
    return [*notes, rate]
