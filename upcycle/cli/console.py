"""What every command shares: output, progress, errors and exit codes."""

import functools
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from upcycle import stopping
from upcycle.cli import is_first_process
from upcycle.cli.app import HELP, app
from upcycle.cli.flags import flags_of
from upcycle.errors import UpcycleError, UpcycleWarning
from upcycle.progress import Watcher, ignore
from upcycle.training import team as started
from upcycle.utf8 import shown, to_json

EXIT_CHECK_FAILED = 1
EXIT_OUR_BUG = 70

_SHARED = {
    "json_": typer.Option("--json", help="Print one JSON object on stdout."),
    "quiet": typer.Option("--quiet", help="Print nothing but errors."),
    "debug": typer.Option("--debug", help="Show the traceback of an error."),
}


@dataclass(frozen=True)
class Console:
    """Where a command prints. Text is silent under `--json` and `--quiet`."""

    json: bool
    quiet: bool

    def print(self, text: str = "") -> None:
        """Print a line for people."""
        if not (self.json or self.quiet):
            print(shown(text))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows in aligned columns, the first to the left and the others to the right."""
        table = [header, *rows]
        first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *cells in table:
            aligned = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
            self.print("  ".join([name.ljust(first), *aligned]).rstrip())

    @contextmanager
    def progress(self) -> Iterator[Watcher]:
        """A watcher that stderr shows: a bar with rate and ETA in a terminal, else some lines."""
        if self.quiet:
            yield ignore
            return
        if sys.stderr.isatty():
            from upcycle.cli.progress_bar import progress_bar as shown_progress
        else:
            from upcycle.cli.progress_lines import progress_lines as shown_progress
        with shown_progress() as watcher:
            yield watcher


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        data: the machine-readable result, printed under `--json`.
        passed: False makes the exit code 1: a check or a margin failed.
    """

    data: dict[str, Any]
    passed: bool = True


def command(name: str, *, together: bool = False, **settings: Any) -> Callable[..., Any]:
    """Register a function `(console, ...) -> Outcome` as a subcommand with the shared options.

    A parameter of an options model becomes the flags of its fields, see `flags_of`.

    Args:
        name: of the subcommand.
        together: whether the processes that `torchrun` starts share its work; they then end with
            the first one's exit code, and its message is the only one.
        settings: for typer.
    """

    def register(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        signature = inspect.signature(function)
        own = list(signature.parameters.values())[1:]
        models = {p.name: flags for p in own if (flags := flags_of(p)) is not None}

        @functools.wraps(function)
        def run(
            *, context_: typer.Context, json_: bool, quiet: bool, debug: bool, **arguments: Any
        ) -> None:
            def call() -> Outcome:
                options = {name: flags.take(context_, arguments) for name, flags in models.items()}
                return function(console, **options, **arguments)

            first = is_first_process()
            console = Console(json=json_ and first, quiet=quiet or not first)
            team = started.team() if together else None
            code = _run(console, debug, call, team)
            raise typer.Exit(code if team is None else team.end(code))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context_", keyword, annotation=typer.Context),
            *(
                each.replace(kind=keyword)
                for p in own
                for each in (models[p.name].parameters() if p.name in models else [p])
            ),
            *(
                inspect.Parameter(name, keyword, default=False, annotation=Annotated[bool, option])
                for name, option in _SHARED.items()
            ),
        ]
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=None
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, context_settings=HELP, **settings)(run)
        return function

    return register


def _complain(text: str, team: started.Team | None) -> None:
    """Print an error, but for one that the first process of a team tells already."""
    if team is None or team.is_first or not team.has_ended():
        print(text, file=sys.stderr)


def _run(
    console: Console,
    debug: bool,
    function: Callable[[], Outcome],
    team: started.Team | None = None,
) -> int:
    try:
        with _told_warnings(console) as told:
            outcome = function()
        if console.json:
            print(to_json({**outcome.data, **({"warnings": told} if told else {})}, indent=2))
        sys.stdout.flush()
    except UpcycleError as error:
        if debug:
            raise
        _complain(f"error: {error}", team)
        return error.exit_code
    except stopping.Stopped as stop:
        return _stopped(stop.number, stop.what)
    except KeyboardInterrupt:  # where no handlers are installed
        _complain("interrupted", team)
        return stopping.exit_code(signal.SIGINT)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; the interpreter must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        if signalled := stopping.received():  # such as processes that lost each other over it
            return _stopped(signalled[0], f"{type(error).__name__}: {' '.join(str(error).split())}")
        _complain(
            f"internal error: {type(error).__name__}: {error}\n"
            "  where: inside upcycle; this is our bug\n"
            "  fix: run again with --debug and report the traceback",
            team,
        )
        return EXIT_OUR_BUG
    return 0 if outcome.passed else EXIT_CHECK_FAILED


@contextmanager
def _told_warnings(console: Console) -> Iterator[list[str]]:
    """Print each of our warnings once, on stderr, and collect them."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", UpcycleWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if not issubclass(category, UpcycleWarning):
                usual(message, category, *place)
            elif str(message) not in told:
                told.append(str(message))
                if not console.quiet:
                    print(f"warning: {message}", file=sys.stderr)

        warnings.showwarning = show  # type: ignore[assignment]
        yield told


def launcher() -> list[str]:
    """The words that start this program again in as many started."""
    world, local = started.world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world == 1:
        return ["upcycle"]
    nodes = [f"--nnodes={world // local}"] if world > local else []
    return ["torchrun", *nodes, f"--nproc-per-node={local}", "-m", "upcycle"]


def _stopped(number: int, what: str) -> int:
    if is_first_process():
        print(stopping.last_line(number, what), file=sys.stderr)
    return stopping.exit_code(number)


def format_bytes(count: float) -> str:
    """A byte count for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
