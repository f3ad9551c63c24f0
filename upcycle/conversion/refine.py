"""Fit one layer's attention to targets on calibration rows: a regression with held-out rows."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import DataError
from upcycle.families import Role

_STEP = 6e-2  # of a tensor's root mean square: the largest change of an entry in one step
_SMALLEST_STEP = 1e-5  # for tensors of zeros
_WARMUP = 0.05  # of the steps
_LAST = 0.05  # of the largest change is what the last step makes
_BATCH_TOKENS = 4096
_CHECKS = 10  # looks at the held-out rows
_HELD_OUT = 8  # one row of so many is held out


@dataclass(frozen=True)
class Lesson:
    """What an attention is fitted on.

    Attributes:
        inputs: [B, T, D] what it gets.
        targets: [B, T, D] what it is to give.
        weights: [B, T] how much a token's squared error counts.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def split(self) -> tuple["Lesson", "Lesson"]:
        """The rows to fit, and those held out.

        Raises:
            DataError: there is one row only.
        """
        rows = len(self.inputs)
        held_out = max(1, rows // _HELD_OUT)
        if rows < 2:
            raise DataError(
                "refinement needs two rows of calibration text, one of them held out",
                where="--calibration-tokens",
                fix="ask for more tokens",
            )
        return self.rows(slice(held_out, None)), self.rows(slice(held_out))

    def rows(self, chosen: "slice | Tensor") -> "Lesson":
        """Some of the rows, by a slice or by their numbers [n]."""
        return Lesson(self.inputs[chosen], self.targets[chosen], self.weights[chosen])

    def to(self, device: str) -> "Lesson":
        """The same on a device."""
        return Lesson(self.inputs.to(device), self.targets.to(device), self.weights.to(device))


@dataclass(frozen=True)
class Refinement:
    """What a fit reached.

    Attributes:
        before: weighted squared error on the held-out rows, relative to that of no output.
        after: the same with the tensors as they are now; never more than before.
        steps: after how many steps that was.
        precision: what the steps computed in.
    """

    before: float
    after: float
    steps: int
    precision: str = "fp32"


Run = Callable[[Tensor], Tensor]
Tell = Callable[[int, float], None]


def refine(
    run: Run,
    parameters: Mapping[Role, nn.Parameter],
    lesson: Lesson,
    *,
    steps: int,
    seed: int,
    device: str,
    dtypes: Mapping[Role, torch.dtype],
    in_bf16: bool = False,
    tell: Tell,
) -> Refinement:
    """Change parameters so that `run` gives the targets; never to what is worse on held-out rows.

    Adam (Kingma and Ba 2015) with steps in proportion to each tensor's size, since families and
    layers differ in scale, a short warm-up and a cosine to almost nothing. Of the states that are
    looked at on the way the best on held-out rows is kept, rounded as it will be stored.

    Args:
        run: the attention, or whatever contains it: [b, T, D] to [b, T, D], with gradients.
        parameters: what is fitted, in fp32 or fp64 on the device.
        lesson: what to fit, on any device.
        steps: of the optimiser, at most.
        seed: of the order of rows.
        device: where the parameters are.
        dtypes: what each parameter will be stored as.
        in_bf16: run the steps in bf16, over the parameters as masters; what is held out is always
            run in the parameters' own dtype.
        tell: told every look at the held-out rows, with the step and the least error so far.

    Raises:
        DataError: there are too few rows to hold one out.
    """
    fitted, held_out = lesson.to(device).split()
    tensors = list(parameters.values())
    rounding = [dtypes[role] for role in parameters]
    best = [tensor.detach().clone() for tensor in tensors]
    rows = max(1, _BATCH_TOKENS // lesson.inputs.shape[1])
    before = after = _error(run, held_out, rows)
    kept = 0
    optimizer = torch.optim.Adam(
        [{"params": [tensor], "lr": _largest_step(tensor)} for tensor in tensors],
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    batches = _batches(len(fitted.inputs), rows, seed)
    scale = max(_energy(fitted), torch.finfo(torch.float32).tiny)
    every = max(1, steps // _CHECKS)
    for step in range(1, steps + 1):
        batch = fitted.rows(next(batches))
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=in_bf16):
            loss = _squared_error(run, batch) / (scale * batch.weights.numel())
        gradients = torch.autograd.grad(loss, tensors)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        schedule.step()
        if step % every and step < steps:
            continue
        exact = [tensor.detach().clone() for tensor in tensors]
        _set(tensors, [t.to(d).to(t.dtype) for t, d in zip(exact, rounding, strict=True)])
        error = _error(run, held_out, rows)
        if error < after:
            after, kept = error, step
            best = [tensor.detach().clone() for tensor in tensors]
        _set(tensors, exact)
        tell(step, after)
    _set(tensors, best)
    return Refinement(before, after, kept, "bf16" if in_bf16 else "fp32")


def multiplies_bf16(device: str) -> bool:
    """Whether this is a CPU with instructions for products in bf16, several times as fast.

    Other devices are left to the user: what they gain was not measured.
    """
    if device != "cpu":
        return False
    tell: Any = getattr(torch.cpu, "get_capabilities", dict)  # older versions of torch do not tell
    known = tell()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _largest_step(tensor: Tensor) -> float:
    return max(_STEP * float(tensor.detach().square().mean().sqrt()), _SMALLEST_STEP)


def _rate(step: int, steps: int) -> float:
    """The share of the largest step at a step: linear warm-up, then a cosine."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2


def _batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Rows in random order, each once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < min(size, rows):
            left = torch.cat((left, torch.randperm(rows, generator=generator)))
        yield left[:size]
        left = left[size:]


def _squared_error(run: Run, lesson: Lesson) -> Tensor:
    error = run(lesson.inputs).to(lesson.targets.dtype) - lesson.targets
    return (error.square().mean(-1) * lesson.weights).sum()


def _energy(lesson: Lesson) -> float:
    """The weighted mean square of the targets."""
    energies = [
        float((targets.square().mean(-1) * weights).double().mean())
        for targets, weights in zip(lesson.targets, lesson.weights, strict=True)
    ]
    return sum(energies) / len(energies)


@torch.no_grad()
def _error(run: Run, lesson: Lesson, rows: int) -> float:
    """The weighted squared error relative to the targets' own size."""
    starts = range(0, len(lesson.inputs), rows)
    parts = (lesson.rows(slice(start, start + rows)) for start in starts)
    total = sum(float(_squared_error(run, part)) for part in parts)
    energy = _energy(lesson) * lesson.weights.numel()
    return total / energy if energy else 0.0


@torch.no_grad()
def _set(tensors: list[nn.Parameter], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
