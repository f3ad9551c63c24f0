"""What a recipe may say. Frozen, typed, and closed: an unknown key is an error."""

from pathlib import Path

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
