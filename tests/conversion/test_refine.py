"""The fit of one layer: it closes gaps, never does harm, and gives the same bits every time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conversion.streams import some_ids
from tests.tiny import FAMILIES, MULTI_QUERY, convert, kv_settings, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion import refine as refine_module
from upcycle.conversion.calibrated import CalibratedConversion, adds_attention
from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.refine import Lesson, Refinement, multiplies_bf16, refine
from upcycle.errors import DataError, FamilyError
from upcycle.planning import plan

ROWS, LENGTH, HIDDEN = 16, 32, 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_lesson() -> tuple[nn.Linear, Lesson]:
    """A linear map near the one that makes the targets."""
    module = nn.Linear(HIDDEN, HIDDEN, bias=False)
    true = draw(HIDDEN, HIDDEN, seed=1)
    with torch.no_grad():
        module.weight.copy_(true + 0.3 * draw(HIDDEN, HIDDEN, seed=2))
    inputs = draw(ROWS, LENGTH, HIDDEN)
    return module, Lesson(inputs, inputs @ true.T, torch.ones(ROWS, LENGTH))


def fit(
    module: nn.Module, lesson: Lesson, steps: int = 300, dtype: torch.dtype = torch.float32
) -> Refinement:
    parameters = dict(module.named_parameters())
    return refine(
        module,
        parameters,
        lesson,
        steps=steps,
        seed=0,
        device="cpu",
        dtypes=dict.fromkeys(parameters, dtype),
        tell=lambda step, error: None,
    )


def error(module: nn.Module, lesson: Lesson) -> float:
    """Weighted squared error of the held-out rows, relative to their targets."""
    held_out = lesson.split()[1]
    with torch.no_grad():
        wrong = (module(held_out.inputs) - held_out.targets).square().mean(-1) * held_out.weights
    return (wrong.sum() / (held_out.targets.square().mean(-1) * held_out.weights).sum()).item()


def test_it_finds_the_map_that_makes_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine_module, "_BATCH_TOKENS", 128)
    module, lesson = linear_lesson()
    before = error(module, lesson)
    result = fit(module, lesson)
    assert result.before == pytest.approx(before, rel=1e-4)
    assert result.after == pytest.approx(error(module, lesson), rel=1e-4)
    assert result.after < 1e-4 * result.before


def test_what_only_does_harm_leaves_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine_module, "_STEP", 1e6)
    module, lesson = linear_lesson()
    weight = module.weight.detach().clone()
    result = fit(module, lesson, steps=20)
    assert (result.after, result.steps) == (result.before, 0)
    assert torch.equal(module.weight, weight)


def test_steps_to_infinity_leave_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine_module, "_STEP", float("inf"))
    module, lesson = linear_lesson()
    weight = module.weight.detach().clone()
    assert fit(module, lesson, steps=5).steps == 0
    assert torch.equal(module.weight, weight)


def test_the_same_seed_gives_the_same_bits() -> None:
    fitted = []
    for _ in range(2):
        module, lesson = linear_lesson()
        fit(module, lesson, steps=30)
        fitted.append(module.weight.detach().clone())
    assert torch.equal(*fitted)


def test_it_is_judged_as_it_will_be_stored() -> None:
    module, lesson = linear_lesson()
    result = fit(module, lesson, dtype=torch.bfloat16)
    assert torch.equal(module.weight, module.weight.to(torch.bfloat16).float())
    assert result.after == pytest.approx(error(module, lesson), rel=1e-4)


def test_tokens_without_weight_do_not_count() -> None:
    module, lesson = linear_lesson()
    lesson.weights[:, ::4] = 0
    lesson.targets[:, ::4] = 1e4
    assert fit(module, lesson).after < 1e-2


def test_one_row_is_refused() -> None:
    module, lesson = linear_lesson()
    with pytest.raises(DataError, match="two rows"):
        fit(module, lesson.rows(slice(1)))


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", True),
        ("qwen3", True),
        ("mixtral", True),
        ("granite", True),
        ("olmo2", False),  # a norm after the attention
        ("gemma2", False),
        ("cohere", False),  # the MLP beside the attention
        ("phi", False),
        ("falcon_h1", False),
    ],
)
def test_layers_that_add_their_attention_are_told_apart(
    tmp_path: Path, model_type: str, expected: bool
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, model_type))
    ids = some_ids()
    stream = LayerStream(checkpoint, ids.shape[1], device="cpu")
    hidden = stream.embed(ids)
    for layer in stream.layers():
        assert adds_attention(layer, hidden[:1]) is expected
        layer.advance(hidden)


def test_a_scaled_attention_is_not_added_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "granite", residual_multiplier=0.5)
    ids = some_ids()
    stream = LayerStream(Checkpoint.open(folder), ids.shape[1], device="cpu")
    with stream.layer(0) as layer:
        assert not adds_attention(layer, stream.embed(ids)[:1])


@pytest.mark.parametrize("model_type", ["llama", "olmo2"])  # a fit of the attention, of the layer
def test_both_kinds_of_layer_come_closer_to_the_source(tmp_path: Path, model_type: str) -> None:
    source = tiny_checkpoint(tmp_path, model_type, **kv_settings(model_type, 8))
    checkpoint = Checkpoint.open(source)
    todo = plan(checkpoint, kv_heads=4, method="mean")
    apart = {}
    for steps in (1, 100):
        conversion = CalibratedConversion(
            checkpoint, todo, some_ids(rows=32, length=32), refine_steps=steps, device="cpu"
        )
        for layer in conversion.layers():
            assert layer.report.refinement is not None
            assert layer.report.refinement.after <= layer.report.refinement.before
        _, hidden = conversion.state()
        apart[steps] = (hidden["converted"] - hidden["source"]).norm().item()
    assert apart[100] < 0.9 * apart[1]


def test_attention_that_is_taken_apart_in_memory_is_refused(tmp_path: Path) -> None:
    settings = kv_settings("sarvam_moe", 8)
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, "sarvam_moe", **settings))
    todo = plan(checkpoint, kv_heads=4, method="mean")
    conversion = CalibratedConversion(checkpoint, todo, some_ids(), refine_steps=1, device="cpu")
    with pytest.raises(FamilyError, match="sarvam_moe"):
        list(conversion.layers())


# Classes that take attention's output apart in a way of their own, or have no plain attention.
SHOWN = ("afmoe", "falcon", "gemma2", "gpt_oss", "llama", "phi")
TAKES_APART = ("sarvam_moe",)


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in SHOWN else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted({*FAMILIES} - {*TAKES_APART})
    ],
)
def test_every_class_is_fitted_in_bf16_as_well(model_type: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type)
    reached = {}
    for precision in ("fp32", "bf16"):
        made = convert(
            source,
            tmp_path / precision,
            kv_heads=1 if model_type in MULTI_QUERY else 2,
            calibration=["builtin"],
            calibration_tokens=1024,
            calibration_window=128,
            refine=4,
            refine_precision=precision,
        )
        fits = [layer["refinement"] for layer in made.manifest.result.document["layers"]]
        assert all(fit["precision"] == precision for fit in fits)
        reached[precision] = [fit["after"] for fit in fits]
    for exact, fast in zip(reached["fp32"], reached["bf16"], strict=True):
        assert fast <= 1.05 * exact + 1e-6


def test_only_a_cpu_chooses_bf16_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ({"avx512_bf16": True}, {"amx_bf16": True}, {"avx512_bf16": False}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
        assert multiplies_bf16("cpu") == any(known.values())
        assert not multiplies_bf16("cuda")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not multiplies_bf16("cpu")
