"""What a recipe may say. Frozen, typed, and closed: an unknown key is an error."""

from pathlib import Path

from upcycle.options.base import TEXT_WORDS, PathValue, Section
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.options.export import ExportOptions
from upcycle.options.stage import StageOptions
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
        trained_on = () if self.train is None else self.train.data.sources
        own = (source.path for source in trained_on)
        return [*_texts(self.export), *_texts(self.convert), *own, *_texts(self.evaluate)]


def _texts(options: StageOptions | None) -> list[Path]:
    """The files and folders of text that a section names."""
    named = [] if options is None else [getattr(options, name) for name in options.texts()]
    return [path for paths in named for path in paths if str(path) not in TEXT_WORDS]
