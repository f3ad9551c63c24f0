"""The `upcycle` command: registers the subcommands, each a thin file beside this one."""

import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from upcycle.version import __version__

COMMANDS = (
    "inspect",
    "plan",
    "convert",
    "verify",
    "predict",
    "sweep",
    "capacity",
    "train",
    "eval",
    "export",
    "graph",
    "check-export",
    "run",
    "doctor",
    "init",
    "recipe",
    "demo",
)
HELP = {"help_option_names": ["-h", "--help"]}


class _Group(TyperGroup):
    """Lists each command with its whole summary, over as many lines as it takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in COMMANDS:
            found = self.get_command(ctx, name)
            assert found is not None
            rows.append((name, (found.help or "").split("\n\n", maxsplit=1)[0]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="upcycle",
    cls=_Group,
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"upcycle {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Turn a multi-head-attention checkpoint into grouped-query or multi-query attention.

    SRC is a checkpoint folder, a Hub cache snapshot or a Hub id. `upcycle demo` shows all of it on
    a small model; `upcycle init DIR --source SRC` writes a recipe for a model of your own.
    """


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop us
    for name in COMMANDS:
        import_module(f"upcycle.cli.{name.replace('-', '_')}")
    app()
