"""The command line: one thin file per subcommand, and the only place that prints."""

from upcycle.cli.app import main

__all__ = ["main"]
