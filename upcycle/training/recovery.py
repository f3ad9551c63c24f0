"""The way on from a run whose gradients broke: the states that are still good, and a command."""

import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from upcycle import stopping
from upcycle.errors import TrainingError
from upcycle.training.changes import keys_to_allow
from upcycle.training.facts import RunFacts
from upcycle.training.log import LOG_NAME, read_log
from upcycle.training.state import newest_facts, state_folders, step_of
from upcycle.training.step import NO_TARGETS

_LOWER, _USUAL_RATE = 0.1, 1e-4
_BROKEN = "broken-"
_WORSE_THAN_GUESSING = 2.0


def set_aside(work: Path, *, since: int | None, vocabulary: int) -> list[str]:
    """Rename the states that are past help, so that no run goes on from them.

    Args:
        work: the folder of the states and of the log.
        since: the step after which the weights gave no gradient; None where they are not at fault.
        vocabulary: tokens; a state from which the next step's cross-entropy was twice that of
            guessing among them is past help too.

    Returns:
        Their new names.
    """
    limit = _WORSE_THAN_GUESSING * math.log(vocabulary)
    wrecked = {
        record.step - 1
        for record in read_log(work / LOG_NAME)
        if record.ce is not None and record.ce > limit
    }
    found = []
    for folder in state_folders(work):
        step = step_of(folder)
        if step in wrecked or (since is not None and step >= since):
            aside = folder.with_name(f"{_BROKEN}{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            found.append(aside.name)
    return found


def diverged(
    what: str,
    *,
    step: int,
    rows: Sequence[int],
    work: Path,
    facts: RunFacts,
    command: Sequence[str],
) -> TrainingError:
    """The error of a run that computes no numbers any more, with a command that goes on from it.

    Args:
        what: is wrong.
        step: in which that showed, counted from 1.
        rows: of its batch.
        work: the folder of the states, of which the newest is a good one.
        facts: of the run; the state may be from before some of them were changed.
        command: that it was started with.
    """
    states = state_folders(work)
    rate = min(facts.document["learning_rate"] * _LOWER, _USUAL_RATE)
    key = "train.learning_rate="
    words = [*(word for word in command if not word.startswith(key)), f"{key}{rate:.2g}"]
    if states:
        allowed = {"learning_rate"} | keys_to_allow(newest_facts(work) or RunFacts(), facts)
        words += ["--resume", *(w for key in sorted(allowed) for w in ("--allow-change", key))]
    start = f"from the state after step {step_of(states[0])}" if states else "anew"
    return TrainingError(
        what,
        where=f"step {step}" + (f", rows {list(rows[:8])} …" if rows else ""),
        fix=f"go on {start} with a lower rate: `{shlex.join(words)}`; or look at that text",
    )


def kept(work: Path, done: int, *, is_sound: bool) -> str:
    """What a signal leaves of a run.

    Args:
        work: the folder of its states.
        done: steps done.
        is_sound: whether the weights compute numbers; otherwise their state is not saved.
    """
    if not done:
        return "no step was done"
    steps = [step_of(folder) for folder in state_folders(work)]
    if done in steps[:1]:
        return f"the state after step {done} is saved"
    reason = "was not saved, because its loss or gradient is not finite"
    if is_sound:
        reason = f"could not be saved within {stopping.LAUNCHER_PATIENCE:.0f} s"
    last = (
        f"the last whole state is that of step {steps[0]}" if steps else "there is no earlier one"
    )
    return f"the state after step {done} {reason}; {last}"


def without_targets(steps: Sequence[int]) -> list[str]:
    """The note on steps that had nothing to learn from, if there were any."""
    if not steps:
        return []
    named = ", ".join(map(str, steps[:5])) + (", …" if len(steps) > 5 else "")
    return [f"{len(steps)} of the steps were skipped, because {NO_TARGETS}: {named}"]
