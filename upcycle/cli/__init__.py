"""The command line: one thin file per subcommand, and the only place that prints."""

import os

from upcycle import stopping

__all__ = ["main"]


def main() -> None:
    """Run the command line; a signal ends it from here on, even in the middle of an import."""
    with stopping.handling(speaks=is_first_process()):
        from upcycle.cli import app

        app.main()


def is_first_process() -> bool:
    """Under torchrun every process runs the same command; only the first one prints."""
    return os.environ.get("RANK", "0") == "0"
