"""Cross-entropy and distillation, summed over tokens, with flat memory.

Both losses and their gradient are computed in one pass over chunks of tokens, in fp32 (or the
logits' dtype, if wider), so that no second set of fp32 logits [N, V] ever exists.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from upcycle.data.packing import IGNORED

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of fp32 logits at a time


class LossSums(NamedTuple):
    """Sums over the scored tokens, in nats, each a tensor of shape [].

    Attributes:
        loss: cross_entropy * ce + distillation * temperature² * KL at the temperature; this one
            has a gradient.
        cross_entropy: negative log-likelihood of the targets.
        divergence: KL(teacher || student) at the temperature; zero without a teacher.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def loss_sums(
    student: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    *,
    cross_entropy: float,
    distillation: float,
    temperature: float = 1.0,
) -> LossSums:
    """The weighted training loss of a batch and its two parts.

    The factor temperature² keeps the size of the gradient (Hinton et al. 2015, section 2).

    Args:
        student: [B, S, V] logits.
        teacher: [B, S, V] logits without gradient, or None.
        labels: [B, S] token ids in place, `IGNORED` where none is scored; position t is scored
            against labels[t + 1].
        cross_entropy: weight.
        distillation: weight.
        temperature: of both distributions in KL.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    sums = _LossSums.apply(  # type: ignore[no-untyped-call]
        student.flatten(0, 1),
        None if teacher is None else teacher.flatten(0, 1),
        targets.flatten(),
        cross_entropy,
        distillation,
        temperature,
    )
    return LossSums(*sums)


class _LossSums(torch.autograd.Function):
    """Computes the gradient along with the value: d CE = p - onehot, d KL = (p_T - q_T) / T."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor | None,
        targets: Tensor,
        cross_entropy: float,
        distillation: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(student.dtype, torch.float32)
        gradient = torch.zeros_like(student) if ctx.needs_input_grad[0] else None
        ce_sum = torch.zeros((), dtype=torch.float64, device=_sum_device(student))
        kl_sum = torch.zeros_like(ce_sum)
        scored = (targets != IGNORED).nonzero().squeeze(1)
        for rows in torch.split(scored, max(1, _CHUNK_ELEMENTS // student.shape[1])):
            logits = student[rows].to(wide)
            target = targets[rows, None]
            log_p = logits.log_softmax(-1)
            ce_sum -= log_p.gather(1, target).sum().to(ce_sum)
            chunk = torch.zeros_like(log_p)
            if cross_entropy:
                chunk.add_(log_p.exp(), alpha=cross_entropy)
                chunk.scatter_add_(1, target, torch.full_like(target, -cross_entropy, dtype=wide))
            if teacher is not None:
                wanted = teacher[rows].to(wide)
                if temperature != 1.0:
                    log_p = logits.div_(temperature).log_softmax(-1)
                    wanted = wanted / temperature
                log_q = wanted.log_softmax(-1)
                q = log_q.exp()
                kl_sum += log_q.sub_(log_p).mul_(q).sum().to(kl_sum)
                # temperature² times the gradient's own 1 / temperature
                chunk.add_(log_p.exp_().sub_(q), alpha=distillation * temperature)
            if gradient is not None:
                gradient[rows] = chunk.to(student.dtype)
        loss = cross_entropy * ce_sum + distillation * temperature**2 * kl_sum
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ce_sum, kl_sum)
        return loss, ce_sum, kl_sum

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient), None, None, None, None, None


def _sum_device(tensor: Tensor) -> torch.device:
    """Sums are fp64, which MPS lacks."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
