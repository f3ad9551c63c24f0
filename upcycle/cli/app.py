"""The `upcycle` command: registers the subcommands, each a thin file beside this one."""

import sys
from importlib import import_module
from io import TextIOWrapper

import typer

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
)

app = typer.Typer(
    name="upcycle",
    help="Turn a multi-head-attention checkpoint into grouped-query or multi-query attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    """Convert, heal, compare and export. SRC is a folder, a Hub cache snapshot or a Hub id."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop us
    for name in COMMANDS:
        import_module(f"upcycle.cli.{name.replace('-', '_')}")
    app()
