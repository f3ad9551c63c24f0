"""The bar on stderr; loaded only where a terminal will show it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)

from upcycle.progress import Progress, Watcher


@contextmanager
def progress_bar() -> Iterator[Watcher]:
    """A watcher that draws one bar per task with rate, note and ETA."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=RichConsole(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def watch(progress: Progress) -> None:
            if progress.task not in tasks:
                tasks[progress.task] = bar.add_task(
                    progress.task, total=progress.total, unit=progress.unit, rate="", note=""
                )
            task_id = tasks[progress.task]
            speed = next(task.speed for task in bar.tasks if task.id == task_id)
            bar.update(
                task_id,
                completed=progress.done,
                total=progress.total,
                note=progress.note,
                rate=f"{speed:,.0f} {progress.unit}/s" if speed else "",
            )

        yield watch
