"""`uptrain`: from a converted checkpoint and its source to an uptrained checkpoint."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from upcycle.checkpoint.loading import class_config, load_model
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, locked, writing
from upcycle.data.packing import PackedRows
from upcycle.errors import TrainingError
from upcycle.evaluation.models import check_context
from upcycle.progress import Progress, Watcher, ignore
from upcycle.recipe.schema import TrainRecipe
from upcycle.training.facts import run_facts, training_rows
from upcycle.training.isolation import check_isolation
from upcycle.training.log import LOG_NAME, RunLog
from upcycle.training.models import (
    check_vocabulary,
    choose_trainable,
    stored_names,
)
from upcycle.training.result import weights_moved, write_result
from upcycle.training.state import (
    check_facts,
    check_work,
    find_state,
    load_state,
    save_state,
    state_folders,
)
from upcycle.training.step import StepResult, Trainer

# Sharded masters (FSDP, DeepSpeed) would need another state format than `state.py` has.
_SUPPORTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


@dataclass(frozen=True)
class TrainResult:
    """What a run did.

    Attributes:
        output: the uptrained checkpoint.
        log: the JSONL log.
        steps: optimiser steps in all.
        tokens: tokens trained on, over all processes.
        loss: of the last step, nats per token; None when an earlier process ran it.
        heldout_nll: mean NLL before and after, on rows that were not trained on.
        heldout_kl: KL(source || model) before and after, on the same rows.
        masters_moved: share of the trained weights that differ from the start in fp32.
        stored_moved: the same in the stored dtype.
        tokens_per_second: of this process's steps, evaluation left out; 0 when it ran none.
        notes: what the user should know, such as states passed over.
    """

    output: Path
    log: Path
    steps: int
    tokens: int
    loss: float | None
    heldout_nll: tuple[float, float]
    heldout_kl: tuple[float, float]
    masters_moved: float
    stored_moved: float
    tokens_per_second: float
    notes: tuple[str, ...]


def uptrain(
    student: Path,
    teacher: Path,
    recipe: TrainRecipe,
    output: Path,
    work: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    watch: Watcher = ignore,
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
        overwrite: replace an existing output.
        watch: told after each step.

    Raises:
        CheckpointError: the student or the teacher is damaged.
        FamilyError: the student's attention is not of a known family.
        DataError: the text cannot be read, or is too little.
        EvaluationError: rows are longer than a model's context.
        OutputError: the output exists, or it or `work` cannot be written, is being written by
            another run or holds what no run wrote.
        TrainingError: the run cannot start, resume or go on.
    """
    accelerator = _accelerator()
    checkpoint, source = Checkpoint.open(student), Checkpoint.open(teacher)
    check_output(output, overwrite=overwrite, inputs=[checkpoint.folder, source.folder])
    for model in (checkpoint, source):
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
        rows, held_out = training_rows(checkpoint.folder, recipe)
        facts = run_facts(recipe, checkpoint, source, rows)
        run = _Run(accelerator, checkpoint, source, recipe, work, rows, held_out, facts)
        with deterministic(accelerator.device):
            run.start(resume)
            run.train(watch if accelerator.is_main_process else ignore)
        return run.finish(output, overwrite, tuple(run.notes))


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


class _Run:
    """One run's parts, and what happens when."""

    def __init__(
        self,
        accelerator: Accelerator,
        checkpoint: Checkpoint,
        source: Checkpoint,
        recipe: TrainRecipe,
        work: Path,
        rows: PackedRows,
        held_out: PackedRows,
        facts: Mapping[str, Any],
    ) -> None:
        self.notes: list[str] = []
        self._accelerator = accelerator
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._work = work
        self._held_out = held_out
        self._facts = facts
        self._tokens_per_step = recipe.batch_size * recipe.sequence_length
        # Dropout stays off on both sides: the student follows one fixed function, and a step is
        # then a pure function of weights and rows.
        student = load_model(checkpoint.folder, dtype=torch.float32)
        teacher_dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        teacher = load_model(source.folder, dtype=teacher_dtype).requires_grad_(False)
        check_vocabulary(student, teacher, rows)
        check_isolation(student)
        self._trainable = choose_trainable(student, checkpoint.config, recipe.trainable)
        self._stored = stored_names(student, self._trainable, checkpoint)
        self._trainer = Trainer(accelerator, student, teacher, self._trainable, rows, recipe)
        self._done = 0
        self._loss: float | None = None
        self._steps_now, self._seconds = 0, 0.0

    def start(self, resume: bool) -> None:
        """Restore the newest state, if asked to, and open the log."""
        found = find_state(self._work) if resume else None
        if found is not None:
            check_facts(found, self._facts)
            load_state(found, self._trainable, self._trainer.optimizer)
            self._done = found.step
            self.notes += [*found.notes, f"went on after step {found.step}"]
        # Nobody may write below `work` before everybody has read it.
        self._accelerator.wait_for_everyone()
        self._log = RunLog(
            self._work / LOG_NAME,
            after=None if found is None else found.step,
            writes=self._accelerator.is_main_process,
        )
        if found is not None:
            self._log.write(found.step, resumed=True, notes=list(found.notes))
        if not self._log.held_out:
            self._evaluate()

    def train(self, watch: Watcher) -> None:
        """Run the steps that are left."""
        recipe = self._recipe
        while self._done < recipe.num_steps:
            began = time.perf_counter()
            result = self._trainer.step(self._done)
            seconds = time.perf_counter() - began
            self._done += 1
            self._steps_now += 1
            self._seconds += seconds
            self._loss = result.loss
            self._log_step(result, seconds)
            is_last = self._done == recipe.num_steps
            if is_last or self._done % recipe.evaluate_every == 0:
                self._evaluate()
            if is_last or self._done % recipe.checkpoint_every == 0:
                self._save()
            note = f"loss {result.loss:.4f} · {self._tokens_per_step / seconds:,.0f} tokens/s"
            watch(Progress("train", self._done, recipe.num_steps, "steps", note))

    def finish(self, output: Path, overwrite: bool, notes: tuple[str, ...]) -> TrainResult:
        """Store the result."""
        moved = weights_moved(self._checkpoint, self._stored)
        nll, kl = zip(self._log.held_out[0], self._log.held_out[-1], strict=True)
        tokens = self._done * self._tokens_per_step
        if self._accelerator.is_main_process:
            write_result(
                self._checkpoint,
                output,
                self._stored,
                facts=self._facts,
                result={
                    "tokens": tokens,
                    "masters_moved": moved.masters,
                    "stored_moved": moved.stored,
                },
                overwrite=overwrite,
            )
        self._accelerator.wait_for_everyone()
        return TrainResult(
            output=output,
            log=self._work / LOG_NAME,
            steps=self._done,
            tokens=tokens,
            loss=self._loss,
            heldout_nll=nll,
            heldout_kl=kl,
            masters_moved=moved.masters,
            stored_moved=moved.stored,
            tokens_per_second=self._steps_now * self._tokens_per_step / self._seconds
            if self._seconds
            else 0.0,
            notes=notes,
        )

    def _log_step(self, result: StepResult, seconds: float) -> None:
        if result.skipped:
            self._log.write(self._done, skipped="the gradient was not finite", rows=result.rows)
            self.notes.append(f"step {self._done} was skipped: its gradient was not finite")
            return
        self._log.write(
            self._done,
            tokens=self._done * self._tokens_per_step,
            loss=result.loss,
            ce=result.cross_entropy,
            kl=result.divergence,
            lr=result.learning_rate,
            grad_norm=result.grad_norm,
            tokens_per_second=round(self._tokens_per_step / seconds, 1),
        )

    def _evaluate(self) -> None:
        nll, kl = self._trainer.held_out(self._held_out)
        self._log.write(self._done, heldout_nll=nll, heldout_kl=kl)

    def _save(self) -> None:
        if self._accelerator.is_main_process:
            save_state(
                self._work,
                step=self._done,
                trainable=self._trainable,
                optimizer=self._trainer.optimizer,
                facts=self._facts,
                keep_last=self._recipe.keep_last,
            )
        self._accelerator.wait_for_everyone()


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels whose sums have a fixed order: a resumed run then ends in the same bytes.

    Not `warn_only`, under which cuDNN's attention keeps its other order. Measured without cost on
    an H200. The CPU's kernels need no asking.
    """
    if device.type != "cuda":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)


def _accelerator() -> Accelerator:
    """Processes and device, as `accelerate` or `torchrun` set them up.

    The loop scales losses, casts and counts steps itself: accelerate's own accumulation divides
    by micro-batches rather than tokens.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # Without an accelerator, accelerate must be told that the processes belong together.
    on_cpu = world > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no")
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
