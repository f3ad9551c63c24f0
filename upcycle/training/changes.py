"""What the user may allow to differ between a run and its resumption, and what is told of it."""

from collections.abc import Collection

from upcycle.errors import TrainingError
from upcycle.options.train import TrainOptions
from upcycle.training.facts import FREE_KEYS, SETTING_KEYS, Change, RunFacts
from upcycle.training.state import FoundState
from upcycle.training.step import learning_rate

_FIXED = {
    "batch_size": "rows are counted in batches, so that another size would repeat or skip text",
    "sequence_length": "rows of another length are other rows: text would be repeated or missing",
    "student": "the state holds the weights of the student that the run began with",
    "trainable": "the state holds the moments of the weights that were trained",
}
_CHANGEABLE = (SETTING_KEYS | {"teacher", "rows"}) - _FIXED.keys()
_OF_THE_TEXT = {"data", "assistant_only"}  # with these the rows change too
# Keys inside `train.data`, as a recipe's overrides spell them.
_LONG = {"data.sources": "data", "data.chat.assistant_only": "assistant_only"}
_OF_THE_RATE = {"learning_rate", "schedule", "warmup_steps", "steps"}


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
    found: FoundState, facts: RunFacts, allow_change: Collection[str]
) -> list[Change]:
    """What a resumed run does differently from the run that saved the state.

    Raises:
        TrainingError: naming what differs and was not allowed to, or steps that lie behind.
    """
    step, was, now = found.state.step, found.state.facts.document, facts.document
    changes = [
        Change(step=step, key=key, before=was.get(key), after=now.get(key))
        for key in _differing(found.state.facts, facts)
    ]
    allowed = {*allow_change, *(["rows"] if _OF_THE_TEXT & {*allow_change} else [])}
    refused = [change for change in changes if change.key not in allowed]
    if refused:
        raise TrainingError(
            "the run cannot be resumed because it is no longer the same: "
            + "; ".join(f"{c.key} was {c.before!r} and is {c.after!r}" for c in refused),
            where=str(found.folder),
            fix=_way_out({change.key for change in refused}),
        )
    if now["steps"] < step:
        raise TrainingError(
            f"the state is that of step {step}, behind the {now['steps']} steps asked for",
            where=str(found.folder),
            fix=f"give at least {step} steps",
        )
    return changes


def _differing(was: RunFacts, now: RunFacts) -> list[str]:
    """The facts that differ, apart from those that always may and the text: the rows decide."""
    before, after = was.document, now.document
    keys = {*before, *after} - FREE_KEYS - {"text"}
    return [key for key in sorted(keys) if before.get(key) != after.get(key)]


def keys_to_allow(was: RunFacts, now: RunFacts) -> set[str]:
    """The keys by which a run may go on from a state that has other facts than its own."""
    return _allowing(set(_differing(was, now)))


def _allowing(keys: set[str]) -> set[str]:
    if keys <= {"rows"} and keys:
        return {"data"}
    return keys - {"rows"} if keys & _OF_THE_TEXT else keys


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
    """What a changed run does differently; the rate too, a function of the step and the recipe."""
    notes = [f"changed: {change}" for change in changes]
    step, facts = found.state.step, found.state.facts.document
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
