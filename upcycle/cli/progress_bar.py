"""The bar on stderr; loaded only where a terminal will show it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console as Terminal

from upcycle.progress import Progress, Watcher


@contextmanager
def progress_bar() -> Iterator[Watcher]:
    """A watcher that draws one bar per task with rate, note and ETA."""
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}"),
    )
    with rich.Progress(*columns, console=Terminal(stderr=True)) as bar:
        tasks: dict[str, rich.TaskID] = {}

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
