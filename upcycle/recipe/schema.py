"""What a recipe may say, and where its run keeps what it makes.

Frozen, typed, and closed: an unknown key is an error.
"""

from pathlib import Path

from upcycle.checkpoint.manifest import REPORT_NAME
from upcycle.options.base import PathValue, Section
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.options.export import ExportOptions
from upcycle.options.train import TrainOptions


class Recipe(Section):
    """A whole run."""

    source: str
    """The MHA checkpoint: an absolute folder once loaded, or a Hub id."""
    output: PathValue
    """The folder of every result."""
    convert: ConvertOptions
    """How heads are merged."""
    train: TrainOptions | None = None
    """The uptraining; absent means none."""
    evaluate: EvaluateOptions = EvaluateOptions()
    """The comparison."""
    export: ExportOptions | None = None
    """The Core ML package; absent means none."""

    @property
    def texts(self) -> list[Path]:
        """Every file or folder of text that the recipe reads."""
        sections = (self.export, self.convert, self.train, self.evaluate)
        return [path for section in sections if section is not None for path in section.texts]


class Layout:
    """The names inside a run's folder: where it keeps what it makes.

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
