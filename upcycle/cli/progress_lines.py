"""Progress as lines with times, where stderr is a file or a CI log."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from upcycle.progress import Progress, Watcher

EVERY = 30.0  # seconds until the first line, and between two


@contextmanager
def progress_lines(every: float = EVERY) -> Iterator[Watcher]:
    """A watcher of which stderr tells at times, also while a long step reports nothing.

    Args:
        every: seconds until the first line, and between two; shorter work has none.
    """
    began = time.monotonic()
    starts: dict[str, float] = {}  # of tasks
    latest: Progress | None = None  # set at once: the teller reads it from its own thread
    done = threading.Event()

    def watch(progress: Progress) -> None:
        nonlocal latest
        starts.setdefault(progress.task, time.monotonic())
        latest = progress

    def tell() -> None:
        while not done.wait(every):
            if (now := latest) is not None:
                since = starts[now.task]
                line = line_of(now, since=since, began=began, now=time.monotonic())
                print(line, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield watch
    finally:
        done.set()
        teller.join()


def line_of(latest: Progress, *, since: float, began: float, now: float) -> str:
    """One line: time of day, share done, the step's note, time since the start and to the end.

    Args:
        latest: of a task.
        since: when the task began, seconds.
        began: when all of the work did.
        now: the same clock's present time.
    """
    parts = [f"{time.strftime('%H:%M:%S')} {latest.task} {latest.done / max(latest.total, 1):.0%}"]
    if latest.unit != "B":
        parts[0] += f" ({latest.done:,.0f} of {latest.total:,.0f} {latest.unit})"
    if latest.note:
        parts.append(latest.note)
    parts.append(f"{_clock(now - began)} so far")
    if 0 < latest.done < latest.total:
        left = (now - since) / latest.done * (latest.total - latest.done)
        parts.append(f"about {_clock(left)} left")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
