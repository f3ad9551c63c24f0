"""Cross-entropy and KL, values and gradients, against torch's own formulas."""

import pytest
import torch
from torch.nn import functional

from upcycle.data.packing import IGNORED
from upcycle.models import losses
from upcycle.models.losses import loss_sums


def example(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 7, 11, generator=generator).mul(3).to(dtype).requires_grad_()
    teacher = torch.randn(2, 7, 11, generator=generator).mul(3).to(dtype)
    labels = torch.randint(11, (2, 7), generator=generator)
    labels[0, 0] = labels[1, 3] = labels[1, 4] = IGNORED
    return student, teacher, labels


def reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    weights: tuple[float, float],
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = labels[:, 1:].flatten()
    scored = targets != IGNORED
    z = student[:, :-1].flatten(0, 1)[scored]
    y = teacher[:, :-1].flatten(0, 1)[scored]
    ce = functional.cross_entropy(z, targets[scored], reduction="sum")
    kl = functional.kl_div(
        (z / temperature).log_softmax(-1),
        (y / temperature).log_softmax(-1),
        reduction="sum",
        log_target=True,
    )
    return weights[0] * ce + weights[1] * temperature**2 * kl, ce, kl


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [11, 1 << 24])
def test_values_and_gradients(
    weights: tuple[float, float], temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    student, teacher, labels = example()
    ours = loss_sums(
        student,
        teacher,
        labels,
        cross_entropy=weights[0],
        distillation=weights[1],
        temperature=temperature,
    )
    theirs = reference(student, teacher, labels, weights, temperature)
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs.detach(), rtol=1e-12, atol=1e-12, check_dtype=False)
    (gradient,) = torch.autograd.grad(ours.loss * 0.25, student)
    (expected,) = torch.autograd.grad(theirs[0] * 0.25, student)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_equal_logits_have_no_divergence_and_no_gradient() -> None:
    student, _, labels = example()
    sums = loss_sums(student, student.detach(), labels, cross_entropy=0.0, distillation=1.0)
    (gradient,) = torch.autograd.grad(sums.loss, student)
    assert float(sums.divergence) == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_without_a_teacher() -> None:
    student, labels = example()[0].detach(), example()[2]
    sums = loss_sums(student, None, labels, cross_entropy=1.0, distillation=0.0)
    assert float(sums.divergence) == 0
    assert float(sums.loss) == float(sums.cross_entropy) > 0


def test_nothing_scored() -> None:
    student, teacher, labels = example()
    sums = loss_sums(
        student, teacher, torch.full_like(labels, IGNORED), cross_entropy=1.0, distillation=1.0
    )
    (gradient,) = torch.autograd.grad(sums.loss, student)
    assert float(sums.loss.detach()) == 0
    assert gradient.abs().sum() == 0


def test_bf16_logits_are_summed_in_fp32() -> None:
    student, teacher, labels = (t.detach() for t in example())
    low = loss_sums(
        student.bfloat16(), teacher.bfloat16(), labels, cross_entropy=1.0, distillation=1.0
    )
    high = loss_sums(
        student.bfloat16().double(),
        teacher.bfloat16().double(),
        labels,
        cross_entropy=1.0,
        distillation=1.0,
    )
    torch.testing.assert_close(low.loss, high.loss, rtol=1e-6, atol=1e-6)
