"""What the stages of a run share: what was asked for, and what files hold, each hashed once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file, hash_folder
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.recipe.schema import Layout, Recipe
from upcycle.report.build import LOADED_SUFFIXES
from upcycle.training.log import LOG_NAME


class Contents(dict[Path, dict[str, str]]):
    """Hash of every visible file below a folder but its manifest, by the folder.

    None where there is no folder. Taken once, until what a stage has made anew is popped.
    """

    def __missing__(self, folder: Path) -> dict[str, str]:
        return self.setdefault(folder, hash_folder(folder))


@dataclass(frozen=True)
class Run:
    """A run as it was asked for.

    Attributes:
        recipe: what to do.
        source: the folder of the recipe's source.
        command: how to make the report again, for its provenance.
        inputs: files that the output must not touch beside those that the recipe names.
        overwrite: whether to replace what another command or another recipe made.
        strict: whether what would only be warned of is refused too.
        contents: the hashes of what is read and made.
    """

    recipe: Recipe
    source: Path
    command: str = ""
    inputs: tuple[Path, ...] = ()
    overwrite: bool = False
    strict: bool = False
    contents: Contents = field(default_factory=Contents)

    @property
    def layout(self) -> Layout:
        """Where everything goes."""
        return Layout(self.recipe)

    @property
    def last(self) -> Path:
        """The checkpoint that is judged and exported."""
        return self.layout.converted if self.recipe.train is None else self.layout.uptrained

    @property
    def candidates(self) -> list[Path]:
        """The checkpoints that are compared with the source."""
        return list(dict.fromkeys([self.layout.converted, self.last]))

    @property
    def log(self) -> Path | None:
        """The log of the uptraining, where there is one."""
        return None if self.recipe.train is None else training_log(self.recipe)

    def models(self) -> dict[str, Any]:
        """Hashes that stand for the compared checkpoints."""
        made = [hash_file(folder / MANIFEST_NAME) for folder in self.candidates]
        return {"source": self.source_files(), "candidates": made}

    def content(self, path: Path) -> str | dict[str, str]:
        """Hashes of a file, or of every file of a folder."""
        return self.contents[path] if path.is_dir() else hash_file(path)

    def source_files(self) -> dict[str, str]:
        """Hashes of what loading the source reads."""
        return loaded(self.contents[self.source])

    def weights(self, folder: Path) -> dict[str, str]:
        """Hashes of a checkpoint's configuration and weights."""
        found = self.contents[folder]
        headers = Checkpoint.open(folder).headers
        return {name: found[name] for name in (CONFIG_FILE, *(h.path.name for h in headers))}


def training_log(recipe: Recipe) -> Path | None:
    """The log in the folder of a recipe's training states, where one was begun."""
    log = Layout(recipe).training / LOG_NAME
    return log if log.is_file() else None


def loaded(files: Mapping[str, str]) -> dict[str, str]:
    """Those of a folder's hashes that are of what loading reads, and not of cards and pictures."""
    return {name: known for name, known in files.items() if Path(name).suffix in LOADED_SUFFIXES}
