"""Running the stages of a recipe that are not finished.

A stage is finished when its output's manifest tells that it was made from these inputs by these
options, by whichever command. What the run itself made is made again when the recipe changes;
what another command made, or what was trained, is refused instead of being lost.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.reader import resolve
from upcycle.checkpoint.staging import check_output, locked, writing
from upcycle.errors import OutputError, TrainingError
from upcycle.pipeline import training
from upcycle.pipeline.contents import Contents
from upcycle.pipeline.layout import Layout
from upcycle.pipeline.outputs import Found, Stage, find
from upcycle.pipeline.records import Records
from upcycle.pipeline.request import request_checks
from upcycle.pipeline.stages import REPORT_JSON, Run, stages_of, training_changes
from upcycle.progress import Watcher, ignore
from upcycle.recipe.schema import Recipe
from upcycle.report.schema import ReportDocument, read_document
from upcycle.training.state import check_work, newest_facts, state_folders
from upcycle.training.team import Team
from upcycle.version import __version__

_ANEW = "restore what changed, name another output, or pass --overwrite to"


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Attributes:
        layout: where everything is.
        skipped: the stages that were finished before.
        report: the content of report.json.
        package: the Core ML package, or None where the recipe exports none.
    """

    layout: Layout
    skipped: tuple[str, ...]
    report: ReportDocument
    package: Path | None

    @property
    def passed(self) -> bool:
        """Whether every margin of the recipe was kept."""
        return self.report.comparison.passed


def run(
    recipe: Recipe,
    *,
    command: str,
    inputs: Iterable[Path] = (),
    overwrite: bool = False,
    watch: Watcher = ignore,
    announce: Callable[[str, bool], None] = lambda name, skipped: None,
    note: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Run the stages of a recipe that are not finished yet.

    Of several processes that `torchrun` started, the first one calls this and the others `join`.

    Args:
        recipe: what to do.
        command: how to make the report again, for its provenance.
        inputs: files that the output must not touch beside those that the recipe names.
        overwrite: replace what another command or another recipe made here, training states and
            what was trained among it.
        watch: told the progress of the running stage.
        announce: told each stage's name and whether it is skipped, before it runs.
        note: told what the user should know.

    Raises:
        OutputError: the output folder overlaps an input, cannot be written, is being written by
            another run, or holds what would be lost.
        TrainingError: what was trained would be lost.
        UpcycleError: a stage's own errors; earlier stages stay finished.
    """
    chunked = recipe.export is not None and recipe.export.chunk_size is not None
    layout = Layout(recipe.output, chunked=chunked)
    source = resolve(recipe.source)
    for _, check in request_checks(recipe, source, inputs):
        check()
    with writing(layout.output):
        layout.output.mkdir(parents=True, exist_ok=True)
    with locked(layout.output.resolve(), layout.output):
        parts = Run(recipe, source, layout, command, Contents())
        skipped = _Runner(parts, overwrite, note).run(watch, announce)
    report = read_document(ReportDocument, layout.report / REPORT_JSON)
    package = None if recipe.export is None else layout.package
    return RunResult(layout, tuple(skipped), report, package)


def join(recipe: Recipe, crew: Team) -> None:
    """Train whenever the first process begins to, until it ends; the other processes do.

    Raises:
        UpcycleError: as for `uptrain`.
    """
    while crew.wait() is not None:
        training.start(recipe, resume=True, overwrite=True)


class _Runner:
    """The stages of one run, and what may be replaced for them."""

    def __init__(self, run: Run, overwrite: bool, note: Callable[[str], None]) -> None:
        self._run = run
        self._stages = stages_of(run)
        self._overwrite = overwrite
        self._note = note
        self._records = Records(run.layout.stages)

    def run(self, watch: Watcher, announce: Callable[[str, bool], None]) -> list[str]:
        """Run what is not finished; the names of the stages that were."""
        check_work(self._run.layout.training)
        self._look_ahead()
        skipped = []
        for stage in self._stages:
            found = self._find(stage)
            announce(stage.name, found.is_finished)
            if found.is_finished:
                skipped.append(stage.name)
                self._note_version(stage, found)
                continue
            self._check(stage, found, is_made=True)
            self._records.make_room(stage.name, stage.output)
            if stage.name == "train":
                self._forget_other_states()
            stage.action(watch, self._note)
            self._run.contents.forget(stage.output, stage.manifest.parent)
            self._records.finish(stage.name, stage.output, stage.manifest, stage.unnoted())
        return skipped

    def _look_ahead(self) -> None:
        """Refuse before anything is made what can be known to be refused later."""
        finished: dict[str, bool | None] = {}  # None: will be made again, perhaps to the same bytes
        for stage in self._stages:
            needed = [finished[name] for name in stage.needs]
            exists = os.path.lexists(stage.output)
            if all(needed):
                found = self._find(stage)
                finished[stage.name] = found.is_finished
                # A conversion that is damaged or gone is made again to the same bytes.
                if found.is_finished:
                    continue
                if not found.changes and (found.damaged or stage.name == "convert"):
                    finished[stage.name] = None
            elif False in needed:
                found = Found(exists, ("what it is made from will be made again",))
                finished[stage.name] = False
            else:
                finished[stage.name] = None
                if stage.name != "train" or exists:
                    continue
                found = Found(exists=False)
            self._check(stage, found, is_made=all(needed))
            if exists and not self._is_own(stage):
                check_output(stage.output, overwrite=True)

    def _find(self, stage: Stage) -> Found:
        return find(stage, self._records.read_by(stage.name))

    def _is_own(self, stage: Stage) -> bool:
        return self._records.is_own(stage.name, stage.output, stage.manifest)

    def _check(self, stage: Stage, found: Found, *, is_made: bool) -> None:
        """Refuse to make again what would be lost by it.

        Raises:
            OutputError: another command made what is there.
            TrainingError: something was trained, or is being trained, by another recipe.
        """
        if stage.name == "train":
            self._check_trained(stage, found, is_made)
        elif found.exists and not self._overwrite:
            if not self._is_own(stage):
                check_output(stage.output, overwrite=True)  # a stranger's has its own words
                raise OutputError(
                    f"{stage.output} is there and not of this run: {found.problem}",
                    where=str(stage.output),
                    fix=f"{_ANEW} replace it",
                )
            # Only a conversion to the same bytes leaves the states what they were of.
            if stage.name == "convert" and (found.changes or MANIFEST_NAME in found.damaged):
                self._check_nothing_trained(found)

    def _check_nothing_trained(self, found: Found) -> None:
        layout = self._run.layout
        trained = [folder.name for folder in state_folders(layout.training)]
        trained += [layout.uptrained.name] if os.path.lexists(layout.uptrained) else []
        if trained:
            raise TrainingError(
                f"{layout.converted} was trained ({', '.join(trained)}) and is no longer what the "
                f"recipe asks for: {found.problem}",
                where=str(layout.output),
                fix=f"{_ANEW} convert and train anew",
            )

    def _check_trained(self, stage: Stage, found: Found, is_made: bool) -> None:
        if self._overwrite:
            return
        if found.exists:
            check_output(stage.output, overwrite=True)
            raise TrainingError(
                f"{stage.output} was trained and is not what the recipe asks for: {found.problem}",
                where=str(stage.output),
                fix=f"{_ANEW} train anew",
            )
        changes = self._state_changes(is_made)
        if changes:
            newest = state_folders(self._run.layout.training)[0]
            raise TrainingError(
                f"{newest} is of another run: {'; '.join(changes)}",
                where=str(newest),
                fix=f"{_ANEW} remove its states and train anew",
            )

    def _state_changes(self, is_made: bool) -> list[str]:
        """What makes the recipe's run another one than that of the newest state."""
        facts = newest_facts(self._run.layout.training)
        return [] if facts is None else training_changes(self._run, facts, is_made=is_made)

    def _forget_other_states(self) -> None:
        """Remove the states of another run, which is what an overwrite asks for."""
        work = self._run.layout.training
        if not (self._overwrite and state_folders(work) and self._state_changes(True)):
            return
        with locked(work.resolve(), work):
            folders = state_folders(work)
            self._note(f"removed the states of another run: {', '.join(f.name for f in folders)}")
            for folder in folders:
                shutil.rmtree(folder)

    def _note_version(self, stage: Stage, found: Found) -> None:
        if found.version != __version__:
            self._note(f"{stage.output.name} was made by upcycle {found.version}")
