"""What every stage of a run is: refused, found finished, or made, each by the same rules."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

from upcycle.checkpoint.lineage import differences, other_files
from upcycle.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_folder,
    read_manifest,
)
from upcycle.checkpoint.staging import check_output
from upcycle.errors import CheckpointError, OutputError
from upcycle.options.stage import StageOptions
from upcycle.pipeline.shared import Run
from upcycle.progress import Watcher
from upcycle.version import __version__

ANEW = "restore what changed, name another output, or pass --overwrite to"  # for a refusal's fix
Note = Callable[[str], None]


class Cost(IntEnum):
    """What a precondition looks at, the cheapest first."""

    SETTINGS = 0
    PATHS = 1
    SOURCE = 2
    TEXT = 3
    TRAINING = 4


@dataclass(frozen=True)
class Precondition:
    """What a stage is refused for before the run's first stage.

    Attributes:
        name: what is looked at.
        cost: when; what is no more than `PATHS` is looked at even if every stage is finished.
        look: returns what it saw, or raises `UpcycleError`.
    """

    name: str
    cost: Cost
    look: Callable[[], str]


@dataclass(frozen=True)
class Found:
    """What a stage finds where it makes its output.

    Attributes:
        exists: whether there is anything.
        changes: why it is not what is asked for.
        damaged: its files that are not as they were made.
        version: of upcycle, which made it.
        unreadable: what is wrong with its manifest; empty where it can be read.
    """

    exists: bool
    changes: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    version: str = ""
    unreadable: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing to do."""
        return self.exists and not self.changes and not self.damaged

    @property
    def problem(self) -> str:
        """Why it is not finished, for people."""
        if self.unreadable:
            return self.unreadable
        damaged = [f"{name} is not as it was made" for name in self.damaged]
        return "; ".join([*self.changes, *damaged])


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a run.

    Attributes:
        run: what all stages share.
        asked: the recipe's section.
        output: what it makes.
        name: as manifests name it.
        needs: the stages whose outputs it reads, where the recipe has them.
        is_exact: whether it makes the same bytes again once its output is gone.
        unnoted_kind: what it reads that its manifest does not tell, in words.
    """

    run: Run
    asked: Any
    output: Path
    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = False
    unnoted_kind: ClassVar[str] = ""

    def options(self) -> dict[str, Any]:
        """What is asked for, as its manifest tells it."""
        noted: dict[str, Any] = self.asked.noted()
        return noted

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Hashes of what it reads, as its manifest tells them; what it needs is finished."""

    @abstractmethod
    def make(self, watch: Watcher, note: Note) -> None:
        """Make the output anew, and tell what the user should know."""

    def preconditions(self) -> list[Precondition]:
        """What it is refused for."""
        return []

    @property
    def folder(self) -> Path:
        """Where the manifest lies that tells of the output: in it or beside it."""
        return self.output

    @property
    def manifest(self) -> Path:
        """The manifest itself."""
        return self.folder / MANIFEST_NAME

    def changes(self, manifest: Manifest) -> list[str]:
        """How what is asked for differs from what a manifest tells, in words."""
        made = manifest.options.document
        if isinstance(self.asked, StageOptions):
            made = self.asked.noted_in(made)
        was = {**manifest.source.document, **made}
        return [
            *differences(was, {**self.inputs(), **self.options()}),
            *differences({"upcycle": manifest.versions.get("upcycle")}, {"upcycle": __version__}),
        ]

    def parts(self) -> Mapping[str, Path]:
        """The folders that it makes, each by the key of its files in the manifest's result."""
        return {"files": self.folder}

    def damaged(self, manifest: Manifest) -> list[str]:
        """Files that are missing or not as a manifest tells."""
        wrong = []
        for key, folder in self.parts().items():
            files: Mapping[str, str] = getattr(manifest.result, key)
            wrong += other_files(files, self.run.contents[folder]) if files else [key]
        return wrong

    def unnoted(self) -> str | None:
        """A hash of what it reads and its manifest does not tell; None for nothing."""
        return None

    def find(self, read: str | None) -> Found:
        """Look at its output; the stages that it needs are finished.

        Args:
            read: the hash of what it read when the run made it, as for `unnoted`.
        """
        if not os.path.lexists(self.output):
            return Found(exists=False)
        try:
            manifest = read_manifest(self.folder)
        except CheckpointError as error:
            return Found(True, damaged=(MANIFEST_NAME,), unreadable=error.what)
        if manifest is None:
            return Found(True, damaged=(MANIFEST_NAME,))
        if manifest.stage != self.name:
            return Found(True, changes=(f"it was made by {manifest.stage!r}",))
        changes = self.changes(manifest)
        if not changes and self.unnoted() not in (None, read):
            changes = [f"{self.unnoted_kind} is not known to be the same"]
        damaged = self.damaged(manifest)
        return Found(True, tuple(changes), tuple(damaged), str(manifest.versions.get("upcycle")))

    def refuse_loss(self, found: Found, *, is_own: bool, is_made: bool) -> None:
        """Refuse to make again what would be lost by it.

        Args:
            found: what lies there.
            is_own: whether all of it is of this run.
            is_made: whether the stages that it needs are finished.

        Raises:
            OutputError: another command made what is there.
            TrainingError: something was trained, or is being trained, by another recipe.
        """
        if found.exists and not is_own:
            check_output(self.output, overwrite=True)  # a stranger's has its own words
            raise OutputError(
                f"{self.output} is there and not of this run: {found.problem}",
                where=str(self.output),
                fix=f"{ANEW} replace it",
            )

    def write_manifest(self, folder: Path) -> None:
        """Write the manifest of what was made in a folder."""
        Manifest.of(
            stage=self.name,
            source=self.inputs(),
            options=self.options(),
            libraries=("torch", "transformers"),
            result={"files": hash_folder(folder)},
        ).write(folder)
