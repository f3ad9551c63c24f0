"""Running the stages of a recipe that are not finished.

A stage is finished when its output's manifest tells that it was made from these inputs by these
options, by whichever command. What the run itself made is made again when the recipe changes;
what another command made, or what was trained, is refused instead of being lost.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from upcycle.checkpoint.reader import resolve
from upcycle.checkpoint.staging import check_output, locked, writing
from upcycle.errors import UpcycleError
from upcycle.pipeline.records import Records
from upcycle.pipeline.shared import Run
from upcycle.pipeline.stage import Cost, Found, Note, Stage
from upcycle.pipeline.stages import preconditions, stages_of
from upcycle.progress import Watcher, ignore
from upcycle.recipe.schema import Layout, Recipe
from upcycle.report.schema import ReportDocument, read_document
from upcycle.training.state import check_work
from upcycle.version import __version__


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
    note: Note = lambda text: None,
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
    asked = Run(recipe, resolve(recipe.source), command, tuple(inputs), overwrite)
    layout = asked.layout
    checks = preconditions(asked)
    early = [check for check in checks if check.cost <= Cost.PATHS]
    late = checks[len(early) :]
    for check in early:
        check.look()
    is_new = not layout.output.is_dir()
    if is_new:  # a refusal leaves nothing
        for check in late:
            check.look()
        with writing(layout.output):
            layout.output.mkdir(parents=True, exist_ok=True)
    with locked(layout.output.resolve(), layout.output):
        runner = _Runner(asked, note)
        if not is_new and not runner.is_finished():
            for check in late:
                check.look()
        check_work(layout.training)
        skipped = runner.run(watch, announce)
    report = read_document(ReportDocument, layout.document)
    return RunResult(layout, tuple(skipped), report, layout.package if recipe.export else None)


class _Runner:
    """The stages of one run, whose output is locked."""

    def __init__(self, run: Run, note: Note) -> None:
        self._run = run
        self._stages = stages_of(run)
        self._note = note
        self._records = Records(run.layout.stages)
        self._found: dict[str, Found] = {}  # until a stage runs

    def is_finished(self) -> bool:
        """Whether every stage is: known without what its preconditions load."""
        if not all(stage.manifest.is_file() for stage in self._stages):
            return False
        try:
            return all(self._find(stage).is_finished for stage in self._stages)
        except UpcycleError:  # the preconditions tell of it, or the run itself
            return False

    def run(self, watch: Watcher, announce: Callable[[str, bool], None]) -> list[str]:
        """Run what is not finished; the names of the stages that were."""
        self._look_ahead()
        skipped = []
        for stage in self._stages:
            found = self._find(stage)
            announce(stage.name, found.is_finished)
            if found.is_finished:
                skipped.append(stage.name)
                if found.version != __version__:
                    self._note(f"{stage.output.name} was made by upcycle {found.version}")
                continue
            self._check(stage, found, is_made=True)
            self._records.make_room(stage)
            stage.make(watch, self._note)
            for folder in (stage.output, stage.folder):
                self._run.contents.pop(folder, None)
            self._found.clear()
            self._records.finish(stage)
        return skipped

    def _look_ahead(self) -> None:
        """Refuse before anything is made what can be known to be refused later."""
        finished: dict[str, bool | None] = {}  # None: will be made again, perhaps to the same bytes
        for stage in self._stages:
            needed = [finished[name] for name in stage.needs if name in finished]
            exists = os.path.lexists(stage.output)
            if all(needed):
                found = self._find(stage)
                if found.is_finished:
                    finished[stage.name] = True
                    continue
                is_same = not found.changes and (found.damaged or stage.is_exact)
                finished[stage.name] = None if is_same else False
            elif False in needed:
                found = Found(exists, ("what it is made from will be made again",))
                finished[stage.name] = False
            else:
                finished[stage.name] = None
                if exists:
                    continue
                found = Found(exists=False)
            self._check(stage, found, is_made=all(needed))
            if exists and not self._records.is_own(stage):
                check_output(stage.output, overwrite=True)

    def _find(self, stage: Stage) -> Found:
        if stage.name not in self._found:
            self._found[stage.name] = stage.find(self._records.of(stage).read)
        return self._found[stage.name]

    def _check(self, stage: Stage, found: Found, *, is_made: bool) -> None:
        if not self._run.overwrite:
            stage.refuse_loss(found, is_own=self._records.is_own(stage), is_made=is_made)
