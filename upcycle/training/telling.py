"""What a run that did not end as hoped tells its user: what is kept, and how to go on."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from upcycle import stopping
from upcycle.errors import TrainingError
from upcycle.recipe.schema import TrainRecipe
from upcycle.training.state import state_folders, step_of
from upcycle.training.step import NO_TARGETS

_LOWER, _USUAL_RATE = 0.1, 1e-4


def kept(work: Path, done: int, *, is_sound: bool) -> str:
    """What a signal leaves of a run.

    Args:
        work: the folder of its states.
        done: steps done.
        is_sound: whether the weights compute numbers; otherwise their state is not saved.
    """
    states = state_folders(work)
    if not done:
        return "no step was done"
    if states and step_of(states[0]) == done:
        return f"the state after step {done} is saved"
    reason = (
        f"could not be saved within {stopping.LAUNCHER_PATIENCE:.0f} s"
        if is_sound
        else "was not saved, for its loss is not finite"
    )
    last = f"the last whole state is that of step {step_of(states[0])}" if states else "there is no"
    return f"the state after step {done} {reason}; {last}{'' if states else ' earlier one'}"


def diverged(
    what: str,
    *,
    step: int,
    rows: Sequence[int],
    work: Path,
    recipe: TrainRecipe,
    command: Sequence[str],
) -> TrainingError:
    """The error of a run that computes no numbers any more, with a command that goes on from it.

    Args:
        what: is wrong.
        step: in which that showed, counted from 1.
        rows: of its batch.
        work: the folder of the states, of which the newest was sound when it was saved.
        recipe: the run.
        command: that it was started with.
    """
    states = state_folders(work)
    rate = min(recipe.learning_rate * _LOWER, _USUAL_RATE)
    words = [*command, f"train.learning_rate={rate:.2g}"]
    if states:
        words += ["--resume", "--allow-change", "learning_rate"]
    start = f"from the state after step {step_of(states[0])}" if states else "anew"
    return TrainingError(
        what,
        where=f"step {step}, rows {list(rows[:8])} …",
        fix=f"go on {start} with a lower rate: `{shlex.join(dict.fromkeys(words))}`; "
        "or look at that text",
    )


def without_targets(steps: Sequence[int]) -> list[str]:
    """The note on steps that had nothing to learn from, if there were any."""
    if not steps:
        return []
    named = ", ".join(map(str, steps[:5])) + (", …" if len(steps) > 5 else "")
    return [f"{len(steps)} of the steps were skipped, for {NO_TARGETS}: {named}"]
