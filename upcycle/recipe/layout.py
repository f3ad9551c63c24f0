"""The names inside a run's folder."""

from upcycle.checkpoint.marks import REPORT_NAME
from upcycle.recipe.schema import Recipe


class Layout:
    """Where the run of a recipe keeps what it makes.

    Attributes:
        output: the folder of all below.
        converted: the converted checkpoint (0 training).
        uptrained: the uptrained checkpoint.
        training: training states and log.
        evaluation: the folder of the comparison.
        comparison: what the report is made from.
        report: the folder of report.json, report.md and report.html.
        document: the report as data.
        package: the Core ML package, or the folder of its chunks.
        stages: the record of what the run made.
    """

    def __init__(self, recipe: Recipe) -> None:
        is_chunked = recipe.export is not None and recipe.export.chunk_size is not None
        self.output = recipe.output
        self.converted = self.output / "converted"
        self.uptrained = self.output / "uptrained"
        self.training = self.output / "training"
        self.evaluation = self.output / "evaluation"
        self.comparison = self.evaluation / "comparison.json"
        self.report = self.output / "report"
        self.document = self.report / REPORT_NAME
        self.package = self.output / ("model" if is_chunked else "model.mlpackage")
        self.stages = self.output / "stages.json"
