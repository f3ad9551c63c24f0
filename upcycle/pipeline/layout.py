"""Where a run keeps what it makes, and that this is nowhere near what it reads."""

from collections.abc import Iterable
from pathlib import Path

from upcycle.errors import DataError, OutputError


class Layout:
    """Where a run keeps what it makes.

    Attributes:
        output: the folder of all below.
        converted: the converted checkpoint (0 training).
        uptrained: the uptrained checkpoint.
        training: training states and log.
        evaluation: comparison.json, from which the report is made.
        report: report.json, report.md and report.html.
        package: the Core ML package, or the folder of its chunks.
        stages: the record of the finished stages.
    """

    def __init__(self, output: Path, *, chunked: bool = False) -> None:
        self.output = output
        self.converted = output / "converted"
        self.uptrained = output / "uptrained"
        self.training = output / "training"
        self.evaluation = output / "evaluation"
        self.report = output / "report"
        self.package = output / ("model" if chunked else "model.mlpackage")
        self.stages = output / "stages.json"


def check_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse inputs that are missing, and an output folder that one of them shares.

    Raises:
        DataError: there is no such input.
        OutputError: the output is, lies in or contains one of them.
    """
    mine = output.resolve()
    for path in inputs:
        theirs = path.resolve()
        if not theirs.exists():
            raise DataError(
                f"there is no {path}", where=str(theirs), fix="name a file or folder that exists"
            )
        if mine.is_relative_to(theirs) or theirs.is_relative_to(mine):
            raise OutputError(
                f"the output {output} and the input {path} must lie outside each other",
                where=str(mine),
                fix="name an output beside the inputs, which are only read",
            )
