"""What a run tells its user of steps that did not go as hoped."""

from collections.abc import Sequence
from pathlib import Path

from upcycle import stopping
from upcycle.training.state import state_folders, step_of
from upcycle.training.step import NO_TARGETS


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
        else "was not saved, for its loss or gradient is not finite"
    )
    last = f"the last whole state is that of step {step_of(states[0])}" if states else "there is no"
    return f"the state after step {done} {reason}; {last}{'' if states else ' earlier one'}"


def without_targets(steps: Sequence[int]) -> list[str]:
    """The note on steps that had nothing to learn from, if there were any."""
    if not steps:
        return []
    named = ", ".join(map(str, steps[:5])) + (", …" if len(steps) > 5 else "")
    return [f"{len(steps)} of the steps were skipped, for {NO_TARGETS}: {named}"]
