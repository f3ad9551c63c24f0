"""The second stage: the converted checkpoint, trained towards the source or another teacher."""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.lineage import TRAIN, differences
from upcycle.checkpoint.manifest import Manifest
from upcycle.checkpoint.staging import check_output, locked
from upcycle.errors import TrainingError
from upcycle.options.train import TrainOptions
from upcycle.pipeline import training
from upcycle.pipeline.stage import ANEW, Cost, Found, Note, Precondition, Stage
from upcycle.progress import Watcher
from upcycle.training.facts import SETTING_KEYS, RunFacts, row_facts, run_settings, text_facts
from upcycle.training.launch import check_launch
from upcycle.training.rows import check_text, training_rows
from upcycle.training.state import newest_facts, state_folders


class Train(Stage):
    """Uptrain, on all processes that were started together."""

    name = TRAIN
    needs = ("convert",)
    asked: TrainOptions

    def preconditions(self) -> list[Precondition]:
        """How the processes were started, the teacher, the trained weights and the text."""
        asked, source = self.asked, self.run.source

        def check_weights() -> str:
            from upcycle.training.models import check_trainable

            return check_trainable(source, asked.trainable)

        checks = [
            Precondition("launch", Cost.SETTINGS, lambda: check_launch(asked)),
            Precondition("teacher", Cost.TRAINING, lambda: training.check_teacher(self.run.recipe)),
            Precondition("trained weights", Cost.TRAINING, check_weights),
            Precondition("training text", Cost.TRAINING, lambda: check_text(source, asked)),
        ]
        return [check for check in checks if check.name != "teacher" or asked.teacher is not None]

    def options(self) -> dict[str, Any]:
        """The section, by the names and values of a run's facts."""
        return run_settings(self.asked)

    def inputs(self) -> dict[str, Any]:
        """Configuration and weights of both models."""
        student = self.run.weights(self.run.layout.converted)
        return {**self._teacher(), "student": student}

    def _teacher(self) -> dict[str, Any]:
        return {"teacher": self.run.weights(training.teacher_of(self.run.recipe))}

    def parts(self) -> Mapping[str, Path]:
        """The checkpoint, of whose files the weights alone are noted."""
        return {"weights": self.output}

    def changes(self, manifest: Manifest) -> list[str]:
        """The run that made the result was another one."""
        made = {**manifest.options.document, **manifest.source.document}
        return self._run_changes(RunFacts.model_validate(made), is_made=True)

    def _run_changes(self, facts: RunFacts, *, is_made: bool) -> list[str]:
        """What makes the recipe's run another than the one that left a state or a result.

        Args:
            facts: of the run that was.
            is_made: whether the converted folder is the recipe's.
        """
        made = facts.document
        known = {key: made[key] for key in SETTING_KEYS if key in made}
        changed = differences(known, self.options())
        for key, now in (self.inputs() if is_made else self._teacher()).items():
            changed += differences({key: made.get(key)}, {key: now})
        # Only the rows decide, but the same text makes the same ones: most runs need no tokenising.
        converted = self.run.layout.converted
        if is_made and not changed and facts.text != text_facts(self.asked, converted):
            rows, _ = training_rows(converted, self.asked)
            now_rows = row_facts(rows).model_dump()
            changed += differences({"rows": made.get("rows")}, {"rows": now_rows})
        return changed

    def _state_changes(self, *, is_made: bool) -> list[str]:
        """What makes the recipe's run another one than that of the newest state."""
        facts = newest_facts(self.run.layout.training)
        return [] if facts is None else self._run_changes(facts, is_made=is_made)

    def make(self, watch: Watcher, note: Note) -> None:
        """Go on from the newest state, or begin."""
        if self.run.overwrite:
            self._forget_other_states(note)
        command = ["upcycle", "train", *shlex.split(self.run.command)[2:]]
        result = training.start(
            self.run.recipe, resume=True, overwrite=True, watch=watch, tell=note, command=command
        )
        for text in result.notes:
            note(text)

    def _forget_other_states(self, note: Note) -> None:
        """Remove the states of another run, which is what an overwrite asks for."""
        work = self.run.layout.training
        if not (state_folders(work) and self._state_changes(is_made=True)):
            return
        with locked(work.resolve(), work):
            folders = state_folders(work)
            note(f"removed the states of another run: {', '.join(f.name for f in folders)}")
            for folder in folders:
                shutil.rmtree(folder)

    def refuse_loss(self, found: Found, *, is_own: bool, is_made: bool) -> None:
        """Refuse to train anew what was trained, whoever asked for it.

        Raises:
            OutputError: a stranger's folder is there.
            TrainingError: it was trained, or is being trained, by another recipe.
        """
        if found.exists:
            check_output(self.output, overwrite=True)
            raise TrainingError(
                f"{self.output} was trained and is not what the recipe asks for: {found.problem}",
                where=str(self.output),
                fix=f"{ANEW} train anew",
            )
        changes = self._state_changes(is_made=is_made)
        if changes:
            newest = state_folders(self.run.layout.training)[0]
            raise TrainingError(
                f"{newest} is of another run: {'; '.join(changes)}",
                where=str(newest),
                fix=f"{ANEW} remove its states and train anew",
            )
