"""`uptrain`: from a converted checkpoint and its source to an uptrained checkpoint."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from upcycle import stopping
from upcycle.checkpoint.files import check_files
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, locked, writing
from upcycle.data.packing import IGNORED, PackedRows
from upcycle.errors import TrainingError
from upcycle.models.comparable import check_context
from upcycle.models.loading import check_causal_lm, class_config, load_model
from upcycle.options.train import TrainOptions
from upcycle.progress import Progress, Watcher, ignore
from upcycle.training.changes import allowed_keys, change_notes, changes_since
from upcycle.training.facts import Change, RunFacts, run_facts
from upcycle.training.launch import check_launch
from upcycle.training.log import LOG_NAME, LogRecord, RunLog
from upcycle.training.models import (
    check_isolation,
    check_vocabulary,
    choose_trainable,
    stored_names,
)
from upcycle.training.recovery import diverged, kept, set_aside, without_targets
from upcycle.training.result import TrainResult, weights_moved, write_result
from upcycle.training.rows import target_share, training_rows
from upcycle.training.state import (
    check_work,
    find_state,
    load_state,
    remove_unfinished,
    save_state,
    state_folders,
)
from upcycle.training.step import (
    MAX_SKIPPED_IN_A_ROW,
    NO_TARGETS,
    StepResult,
    Trainer,
    deterministic,
)
from upcycle.training.team import peers, world_size

# Sharded masters (FSDP, DeepSpeed) would need another state format than `state.py` has.
_SUPPORTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
_WRITING_TIME = timedelta(hours=6)


def uptrain(
    student: Path,
    teacher: Path,
    recipe: TrainOptions,
    output: Path,
    work: Path,
    *,
    resume: bool = False,
    allow_change: Collection[str] = (),
    overwrite: bool = False,
    watch: Watcher = ignore,
    tell: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = ("upcycle", "train", "RECIPE"),
) -> TrainResult:
    """Train a checkpoint to behave like its source, and store it in its own layout.

    Rows, order and rates are functions of the recipe and the step, so a run that was killed goes
    on from its newest state to the very same weights. Started by `torchrun`, it shares each batch
    among the processes.

    Args:
        student: the converted checkpoint.
        teacher: its source.
        recipe: the run.
        output: the folder to make, with the student's dtypes, names, shards and other files.
        work: the folder of training states and of the log, which all processes can see.
        resume: go on from the newest complete state, if there is one.
        allow_change: keys of the recipe that may differ from the state's, see `changes`.
        overwrite: replace an existing output.
        watch: told after each step.
        tell: told what the user should know before the first step.
        command: how the run was asked for, for what an error advises.

    Raises:
        CheckpointError: the student or the teacher is damaged.
        FamilyError: the student's attention is not of a known family.
        DataError: the text cannot be read, or is too little.
        EvaluationError: rows are longer than a model's context.
        OutputError: the output exists, or it or `work` cannot be written, is being written by
            another run or holds what no run wrote.
        TrainingError: the run cannot start, resume or go on.
        Stopped: a signal was heeded between two steps, and the state is saved.
    """
    check_launch(recipe)
    allow_change = allowed_keys(allow_change)
    if allow_change and not resume:
        raise TrainingError(
            "only a run that goes on can be changed",
            where="--allow-change",
            fix="pass --resume too, or omit --allow-change",
        )
    accelerator = _accelerator()
    checkpoint, source = Checkpoint.open(student), Checkpoint.open(teacher)
    check_output(output, overwrite=overwrite, inputs=[checkpoint.folder, source.folder])
    check_files(checkpoint.folder)
    for model in (checkpoint, source):
        check_causal_lm(model.config, model.tensors, model.folder)
        config = class_config(model.config).get_text_config()
        check_context(config, recipe.sequence_length, model.folder, key="train.sequence_length")
    with _writing_alone(work, accelerator):
        check_work(work)
        if not resume and state_folders(work):
            raise TrainingError(
                f"{work} holds the states of an earlier run",
                where=str(work),
                fix="pass --resume to go on with it, or remove the folder to start anew",
            )
        if accelerator.is_main_process:
            remove_unfinished(work)
        rows, held_out = training_rows(checkpoint.folder, recipe)
        facts = run_facts(recipe, checkpoint, source, rows)
        tell(f"training text: {target_share(rows.num_targets, rows.input_ids.numel())}")
        with peers():
            run = _Run(
                accelerator, checkpoint, source, recipe, work, rows, held_out, facts, command
            )
            with deterministic(accelerator.device):
                run.start(resume, allow_change, tell)
                run.train(watch if accelerator.is_main_process else ignore)
            return run.finish(output, overwrite)


@contextmanager
def _writing_alone(work: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep other runs away from `work`; the main process does it for all of its run."""
    if not accelerator.is_main_process:
        yield
        return
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
    with locked(work.resolve(), work):
        yield


@dataclass
class _Run:
    """One run's parts, and what happens when."""

    accelerator: Accelerator
    checkpoint: Checkpoint
    source: Checkpoint
    recipe: TrainOptions
    work: Path
    rows: PackedRows
    held_out: PackedRows
    facts: RunFacts
    command: Sequence[str]

    def __post_init__(self) -> None:
        recipe = self.recipe
        self._notes: list[str] = []
        self._changes: list[Change] = []
        self._steps_without_targets: list[int] = []
        self._tokens_per_step = recipe.batch_size * recipe.sequence_length
        # Dropout stays off on both sides: the student follows one fixed function, and a step is
        # then a pure function of weights and rows.
        student = load_model(self.checkpoint.folder, dtype=torch.float32)
        teacher_dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        teacher = load_model(self.source.folder, dtype=teacher_dtype).requires_grad_(False)
        check_vocabulary(student, teacher, self.rows)
        check_isolation(student)
        self._trainable = choose_trainable(student, self.checkpoint.config, recipe.trainable)
        self._stored = stored_names(student, self._trainable, self.checkpoint)
        self._trainer = Trainer(
            self.accelerator, student, teacher, self._trainable, self.rows, recipe
        )
        self._done = self._saved = 0
        self._is_sound = True
        self._loss: float | None = None
        self._steps_now, self._seconds = 0, 0.0

    def start(
        self, resume: bool, allow_change: Collection[str], tell: Callable[[str], None]
    ) -> None:
        """Restore the newest state, if asked to, and open the log."""
        found = find_state(self.work) if resume else None
        changes: list[Change] = []
        if found is not None:
            changes = changes_since(found, self.facts, allow_change)
            load_state(found, self._trainable, self._trainer.optimizer)
            self._done = self._saved = found.state.step
            self._changes = [*found.state.changes, *changes]
            self._notes += [*found.notes, f"went on after step {self._done}"]
            for line in change_notes(found, self.recipe, changes):
                tell(line)
                self._notes.append(line)
        # No process may write below `work` before all have read it.
        self.accelerator.wait_for_everyone()
        self._log = RunLog(
            self.work / LOG_NAME,
            after=None if found is None else self._done,
            writes=self.accelerator.is_main_process,
        )
        if found is not None:
            told = {"step": self._done, "resumed": True, "notes": [*found.notes]}
            if changes:
                told["changes"] = [change.model_dump() for change in changes]
            self._log.write(LogRecord.model_validate(told))
        if not self._log.held_out:
            self._evaluate()
        if self.recipe.teacher is not None:
            name = Path(self.recipe.teacher).name
            self._log.write(LogRecord(step=self._done, teacher=name, files=self.facts.teacher))
            self._notes.append(f"the teacher is {name}, as the recipe names it, not the source")

    def train(self, watch: Watcher) -> None:
        """Run the steps that are left.

        Raises:
            Stopped: a signal reached one of the processes.
            TrainingError: `MAX_SKIPPED_IN_A_ROW` steps in a row had no finite gradient.
        """
        with stopping.deferred(self._kept):
            self._heed_signals()
            while self._done < self.recipe.num_steps:
                self._train_step(watch)
                self._heed_signals()

    def _train_step(self, watch: Watcher) -> None:
        recipe = self.recipe
        began = time.perf_counter()
        result = self._trainer.step(self._done)
        seconds = time.perf_counter() - began
        self._done += 1
        self._steps_now += 1
        self._seconds += seconds
        self._log_step(result, seconds)
        if self._trainer.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            what = f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row"
            raise self._diverged(what, result.rows)
        is_last = self._done == recipe.num_steps
        if is_last or self._done % recipe.evaluate_every == 0:
            self._evaluate()
        if is_last or self._done % recipe.checkpoint_every == 0:
            self._save()
        note = f"loss {result.loss:.4f} · {self._tokens_per_step / seconds:,.0f} tokens/s"
        watch(Progress("train", self._done, recipe.num_steps, "steps", note))

    def _heed_signals(self) -> None:
        """At a step boundary: where a process got a signal, save the state and stop, all alike."""
        number, age = self._trainer.agree(stopping.received() or (0, 0.0))
        if not number:
            return
        stopping.adopt(int(number), age)
        if self._done > self._saved:
            self._save()
        raise stopping.Stopped(int(number), self._kept())

    def _kept(self) -> str:
        return kept(self.work, self._done, is_sound=self._is_sound)

    def finish(self, output: Path, overwrite: bool) -> TrainResult:
        """Store the result."""
        masters_moved, stored_moved = weights_moved(self.checkpoint, self._stored)
        nll, kl = zip(self._log.held_out[0], self._log.held_out[-1], strict=True)
        tokens = self._done * self._tokens_per_step
        tokens_now = self._steps_now * self._tokens_per_step
        changes = [change.model_dump() for change in self._changes]
        if self.accelerator.is_main_process:
            write_result(
                self.checkpoint,
                output,
                self._stored,
                facts=self.facts,
                result={
                    "tokens": tokens,
                    "masters_moved": masters_moved,
                    "stored_moved": stored_moved,
                    **({"changes": changes} if changes else {}),
                },
                overwrite=overwrite,
            )
        self.accelerator.wait_for_everyone()
        return TrainResult(
            output=output,
            log=self.work / LOG_NAME,
            steps=self._done,
            tokens=tokens,
            loss=self._loss,
            heldout_nll=nll,
            heldout_kl=kl,
            masters_moved=masters_moved,
            stored_moved=stored_moved,
            tokens_per_second=tokens_now / self._seconds if self._seconds else 0.0,
            notes=(*self._notes, *without_targets(self._steps_without_targets)),
        )

    def _log_step(self, result: StepResult, seconds: float) -> None:
        if result.skipped is not None:
            self._log.write(LogRecord(step=self._done, skipped=result.skipped, rows=result.rows))
            if result.skipped == NO_TARGETS:
                self._steps_without_targets.append(self._done)
            else:
                self._notes.append(f"step {self._done} was skipped: its gradient was not finite")
            return
        self._loss = result.loss
        record = LogRecord(
            step=self._done,
            tokens=self._done * self._tokens_per_step,
            loss=result.loss,
            ce=result.cross_entropy,
            kl=result.divergence,
            lr=result.learning_rate,
            grad_norm=result.grad_norm,
            tokens_per_second=round(self._tokens_per_step / seconds, 1),
        )
        self._log.write(record)

    def _diverged(self, what: str, numbers: Sequence[int]) -> TrainingError:
        # The weights have not moved since; where they are at fault, so are the states of them.
        is_sound = not numbers or self._trainer.is_sound(self.rows, numbers)
        since = None if is_sound else self._done - self._trainer.skipped_in_a_row
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            vocabulary = self._trainer.student.config.vocab_size
            broken = set_aside(self.work, since=since, vocabulary=vocabulary)
            self._log.write(LogRecord(step=self._done, set_aside=broken))
        self.accelerator.wait_for_everyone()
        return diverged(
            what,
            step=self._done,
            rows=numbers,
            work=self.work,
            facts=self.facts,
            command=self.command,
        )

    def _evaluate(self) -> None:
        nll, kl = self._trainer.held_out(self.held_out)
        self._log.write(LogRecord(step=self._done, heldout_nll=nll, heldout_kl=kl))

    def _save(self) -> None:
        """Save the state, unless its weights compute no numbers: no run could go on from that."""
        fullest = int((self.held_out.labels != IGNORED).sum(dim=1).argmax())
        self._is_sound = self._trainer.is_sound(self.held_out, [fullest])
        if not self._is_sound:
            what = "the loss or its gradient on a held-out row is not finite"
            self._log.write(LogRecord(step=self._done, unsaved=what))
            if self._done == self.recipe.num_steps:
                raise self._diverged(what, [])
            return
        # While steps are skipped, the states before may be the last ones that are any good.
        keeps_all = self._trainer.skipped_in_a_row > 0
        if self.accelerator.is_main_process:
            save_state(
                self.work,
                step=self._done,
                trainable=self._trainable,
                optimizer=self._trainer.optimizer,
                facts=self.facts,
                changes=self._changes,
                keep_last=None if keeps_all else self.recipe.keep_last,
            )
        self.accelerator.wait_for_everyone()
        self._saved = self._done


def _accelerator() -> Accelerator:
    """Processes and device, as `accelerate` or `torchrun` set them up.

    The loop scales losses, casts and counts steps itself: accelerate's own accumulation divides
    by micro-batches rather than tokens.
    """
    world = world_size()
    # Without an accelerator, accelerate must be told that the processes belong together.
    on_cpu = world > 1 and not torch.accelerator.is_available()
    # The others wait at a barrier while the main process writes a state or the result.
    patience = InitProcessGroupKwargs(timeout=_WRITING_TIME)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[patience])
    if accelerator.distributed_type not in _SUPPORTED:
        raise TrainingError(
            f"training under {accelerator.distributed_type.value} is not supported",
            where="the accelerate configuration",
            fix="start plain data parallelism with `torchrun --nproc-per-node N -m upcycle train`",
        )
    if accelerator.num_processes != world:
        raise TrainingError(
            f"{world} processes were started, and accelerate joined {accelerator.num_processes}",
            where=f"WORLD_SIZE, and processes on {accelerator.device.type}",
            fix="start one process, or set ACCELERATE_USE_CPU=true to train on the CPU",
        )
    return accelerator
