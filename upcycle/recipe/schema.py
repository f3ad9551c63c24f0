"""What a recipe may say. Frozen, typed, and closed: an unknown key is an error."""

from pathlib import Path

from upcycle.options.base import BUILTIN, PathValue, Section
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.options.export import ExportRecipe
from upcycle.options.train import TrainOptions


class Recipe(Section):
    """A whole run.

    Attributes:
        source: the MHA checkpoint: an absolute folder once loaded, or a Hub id.
        output: the folder of every result.
        convert: how heads are merged.
        train: the uptraining; absent means none.
        evaluate: the comparison.
        export: the Core ML package; absent means none.
    """

    source: str
    output: PathValue
    convert: ConvertOptions
    train: TrainOptions | None = None
    evaluate: EvaluateOptions = EvaluateOptions()
    export: ExportRecipe | None = None

    @property
    def texts(self) -> list[Path]:
        """Every file or folder of text that the recipe reads."""
        trained_on = () if self.train is None else self.train.data.sources
        measured_on = () if self.export is None else self.export.calibration
        measured_on += self.convert.calibration
        calibration = (path for path in measured_on if str(path) != BUILTIN)
        own = (source.path for source in trained_on)
        return [*calibration, *own, *self.evaluate.text]
