"""One optimiser step, on any number of processes: its rows, its rate and its bits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from upcycle.data.packing import IGNORED, PackedRows, batch_rows, micro_batch
from upcycle.errors import TrainingError
from upcycle.models.losses import LossSums, loss_sums
from upcycle.options.train import TrainOptions
from upcycle.training.models import parameter_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


# The last fifth of a warm-up-stable-decay run cools down by 1 - sqrt(progress)
# (Hägele et al. 2024, arXiv:2405.18392, section 4).
_COOLDOWN_SHARE = 0.2


def learning_rate(step: int, recipe: TrainOptions) -> float:
    """The rate of optimiser step `step`, counted from 0.

    It rises linearly to the peak during the warm-up and reaches zero one step after the last,
    except for "constant".
    """
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    after_warmup = recipe.num_steps - recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / after_warmup if after_warmup else 0.0
    return recipe.learning_rate * _shape(recipe.schedule, progress)


def _shape(schedule: str, progress: float) -> float:
    """The share of the peak at `progress` in [0, 1) after the warm-up."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return 1 - progress
    if schedule == "wsd":
        cooldown = (progress - (1 - _COOLDOWN_SHARE)) / _COOLDOWN_SHARE
        return 1.0 if cooldown <= 0 else 1 - math.sqrt(cooldown)
    assert schedule == "constant", schedule
    return 1.0


# A run whose gradients stay broken would only burn time; single bad steps are passed over.
MAX_SKIPPED_IN_A_ROW = 5
NOT_FINITE = "the gradient was not finite"
NO_TARGETS = "no token of its rows carries a loss"


@dataclass(frozen=True)
class StepResult:
    """What one step measured, per scored token of the global batch.

    Attributes:
        loss: the weighted training loss.
        cross_entropy: nats.
        divergence: KL(source || student) in nats.
        learning_rate: used.
        grad_norm: before clipping.
        rows: row numbers of the global batch.
        skipped: why the weights did not move, `NOT_FINITE` or `NO_TARGETS`; None where they did.
            Without targets there is no loss either: the numbers are NaN.
    """

    loss: float
    cross_entropy: float
    divergence: float
    learning_rate: float
    grad_norm: float
    rows: list[int]
    skipped: str | None


class Trainer:
    """The student, its teacher and its optimiser, spread over the processes.

    Losses are summed and divided by the scored tokens of the whole global batch, so neither the
    micro-batch size nor the number of processes changes the gradient.

    Args:
        accelerator: the processes.
        student: with fp32 weights; those in `trainable` require a gradient.
        teacher: frozen.
        trainable: the student's moving weights by name.
        rows: the training rows.
        recipe: the run.

    Raises:
        TrainingError: the batch cannot be shared evenly.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: "PreTrainedModel",
        teacher: "PreTrainedModel",
        trainable: Mapping[str, nn.Parameter],
        rows: PackedRows,
        recipe: TrainOptions,
    ) -> None:
        self._accelerator = accelerator
        self._recipe = recipe
        self._rows = rows
        self.skipped_in_a_row = 0
        self._micro_steps = _micro_steps(recipe, accelerator.num_processes)
        self._parameters = list(trainable.values())
        self.teacher = teacher.to(accelerator.device)
        self.student = student.to(accelerator.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(trainable, recipe.weight_decay), betas=recipe.betas, fused=True
        )
        self._model, self._optimizer = accelerator.prepare(student, self.optimizer)

    def step(self, step: int) -> StepResult:
        """Train on the global batch of optimiser step `step`, counted from 0."""
        recipe, accelerator = self._recipe, self._accelerator
        world = accelerator.num_processes
        rows = batch_rows(
            step, batch_size=recipe.batch_size, num_rows=len(self._rows), seed=recipe.seed
        )
        batches = [
            self._rows.batch(
                micro_batch(
                    rows,
                    micro=micro,
                    micro_batch_size=recipe.micro_batch_size,
                    rank=accelerator.process_index,
                    world=world,
                )
            )
            for micro in range(self._micro_steps)
        ]
        num_targets = self._sum(sum(_num_targets(batch) for batch in batches))
        rate = learning_rate(step, recipe)
        if not num_targets:  # of all processes, which therefore all return
            nothing = math.nan
            return StepResult(nothing, nothing, nothing, rate, nothing, rows.tolist(), NO_TARGETS)
        totals = [0.0, 0.0, 0.0]
        for micro, batch in enumerate(batches):
            is_last = micro == len(batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(self._model):
                sums = self.losses(self._model, batch)
                # The processes' gradients are averaged, hence the factor.
                accelerator.backward(sums.loss * (world / num_targets))
            totals = [t + float(value.detach()) for t, value in zip(totals, sums, strict=True)]
        loss, ce, kl = (self._sum(total) / num_targets for total in totals)
        norm = float(accelerator.clip_grad_norm_(self._parameters, recipe.max_grad_norm))
        skipped = None if math.isfinite(norm) and math.isfinite(loss) else NOT_FINITE
        if skipped is None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return StepResult(loss, ce, kl, rate, norm, rows.tolist(), skipped)

    def losses(self, model: Any, batch: Mapping[str, torch.Tensor]) -> LossSums:
        """Loss sums of one micro-batch. No mask and no cache, or packed documents would leak."""
        inputs = self._inputs(batch)
        with self._autocast():
            with torch.no_grad():
                target = self.teacher(**inputs, use_cache=False).logits
            logits = model(**inputs, use_cache=False).logits
        return loss_sums(
            logits,
            target,
            batch["labels"].to(self._accelerator.device),
            cross_entropy=self._recipe.cross_entropy,
            distillation=self._recipe.distillation,
            temperature=self._recipe.temperature,
        )

    def _inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = self._accelerator.device
        return {key: batch[key].to(device) for key in ("input_ids", "position_ids")}

    def _autocast(self) -> torch.autocast:
        is_bf16 = self._recipe.precision == "bf16"
        return torch.autocast(self._accelerator.device.type, torch.bfloat16, enabled=is_bf16)

    @torch.no_grad()
    def held_out(self, rows: PackedRows) -> tuple[float, float]:
        """Mean NLL and KL(source || student) in nats per token of rows that are not trained on."""
        accelerator, size = self._accelerator, self._recipe.micro_batch_size
        own = torch.arange(accelerator.process_index, len(rows), accelerator.num_processes)
        totals = [0.0, 0.0, 0.0]
        for part in torch.split(own, size):
            batch = rows.batch(part)
            sums = self.losses(self.student, batch)
            values = [float(sums.cross_entropy), float(sums.divergence), _num_targets(batch)]
            totals = [total + value for total, value in zip(totals, values, strict=True)]
        ce, kl, num_targets = (self._sum(total) for total in totals)
        return ce / num_targets, kl / num_targets

    def is_sound(self, rows: PackedRows, numbers: Sequence[int]) -> bool:
        """Whether the weights have a finite loss and gradient on some rows; every process finds it.

        Weights that a far too large step has moved may give finite logits, and still no gradient.
        """
        for part in torch.split(torch.tensor(numbers), self._recipe.micro_batch_size):
            batch = rows.batch(part)
            with self._autocast():
                logits = self.student(**self._inputs(batch), use_cache=False).logits
            labels = batch["labels"].to(logits.device)
            sums = loss_sums(logits, None, labels, cross_entropy=1.0, distillation=0.0)
            mean = sums.loss / max(1, _num_targets(batch))
            found = torch.autograd.grad(mean, self._parameters, allow_unused=True)
            norm = torch.nn.utils.get_total_norm([each for each in found if each is not None])
            if not (math.isfinite(float(mean.detach())) and math.isfinite(float(norm))):
                return False
        return True

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the processes."""
        if self._accelerator.num_processes == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float32, device=self._accelerator.device)
        everyones: list[float] = (
            self._accelerator.gather(mine).view(-1, len(values)).amax(0).tolist()
        )
        return everyones

    def _sum(self, value: float) -> float:
        """A number summed over the processes."""
        if self._accelerator.num_processes == 1:
            return float(value)
        wide = torch.float32 if self._accelerator.device.type == "mps" else torch.float64
        tensor = torch.tensor(float(value), dtype=wide, device=self._accelerator.device)
        return float(self._accelerator.reduce(tensor, reduction="sum"))


def _num_targets(batch: Mapping[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _micro_steps(recipe: TrainOptions, world: int) -> int:
    at_once = recipe.micro_batch_size * world
    if recipe.batch_size % at_once:
        raise TrainingError(
            f"batch_size {recipe.batch_size} cannot be shared by {world} processes with "
            f"micro_batch_size {recipe.micro_batch_size}",
            where="recipe, train.batch_size",
            fix=f"make batch_size a multiple of {at_once}",
        )
    return recipe.batch_size // at_once
