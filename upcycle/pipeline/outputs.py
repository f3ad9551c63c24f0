"""What lies where a stage makes its output, and whether it is what is asked for."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.lineage import differences, other_files
from upcycle.checkpoint.manifest import Manifest, read_manifest
from upcycle.errors import CheckpointError
from upcycle.progress import Watcher
from upcycle.version import __version__


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: "convert", "train", "evaluate", "export" or "report", as manifests name it.
        output: what it makes.
        manifest: the `upcycle.json` that tells of it, in the output or beside it.
        needs: the names of the stages whose outputs it reads.
        changes: how what is asked for differs from what a manifest tells, in words; called when
            the stages that it needs are finished.
        damaged: files that are not as a manifest tells.
        action: makes the output anew, and tells what the user should know.
        unnoted: a hash of what it reads and its manifest does not tell; None for nothing.
    """

    name: str
    output: Path
    manifest: Path
    needs: tuple[str, ...]
    changes: Callable[[Manifest], list[str]]
    damaged: Callable[[Manifest], list[str]]
    action: Callable[[Watcher, Callable[[str], None]], None]
    unnoted: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Found:
    """What a stage finds where it makes its output.

    Attributes:
        exists: whether there is anything.
        changes: why it is not what is asked for.
        damaged: its files that are not as they were made.
        version: of upcycle, which made it.
    """

    exists: bool
    changes: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    version: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing to do."""
        return self.exists and not self.changes and not self.damaged

    @property
    def problem(self) -> str:
        """Why it is not finished, for people."""
        damaged = [f"{name} is not as it was made" for name in self.damaged]
        return "; ".join([*self.changes, *damaged])


def find(stage: Stage, read: str | None) -> Found:
    """Look at a stage's output.

    Args:
        stage: those that it needs are finished.
        read: the hash of what it read when the run made it, as for `Stage.unnoted`.
    """
    if not os.path.lexists(stage.output):
        return Found(exists=False)
    manifest = manifest_of(stage)
    if manifest is None:
        return Found(True, damaged=(stage.manifest.name,))
    if manifest.stage != stage.name:
        return Found(True, changes=(f"it was made by {manifest.stage!r}",))
    changes = stage.changes(manifest)
    if not changes and stage.unnoted() not in (None, read):
        changes = ["the quantisation scheme or its text is not known to be the same"]
    damaged = stage.damaged(manifest)
    version = str(manifest.versions.get("upcycle"))
    return Found(True, tuple(changes), tuple(damaged), version)


def manifest_of(stage: Stage) -> Manifest | None:
    """The manifest of a stage's output; None where there is none that can be read."""
    try:
        return read_manifest(stage.manifest.parent)
    except CheckpointError:
        return None


def manifest_changes(
    manifest: Manifest, *, source: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """How inputs, options and the version differ from those of a manifest."""
    was = {**manifest.source.document, **manifest.options.document}
    version = manifest.versions.get("upcycle")
    return [
        *differences(was, {**source, **options}),
        *differences({"upcycle": version}, {"upcycle": __version__}),
    ]


def file_damage(
    known: Mapping[str, str], found: Mapping[str, str], *, name: str = "files"
) -> list[str]:
    """Files that are missing or not as a manifest's result tells.

    Args:
        known: hashes in the manifest.
        found: hashes of what is there.
        name: what they are called where the manifest has none.
    """
    return other_files(known, found) if known else [name]
