"""`upcycle run`: convert, uptrain, evaluate, export and report by one recipe, each stage once."""

from upcycle.pipeline.runner import RunResult, run

__all__ = ["RunResult", "run"]
