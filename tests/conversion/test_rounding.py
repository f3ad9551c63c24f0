"""Equal heads lose nothing whatever the last bits of the moments are, and however poor the text.

Processors sum products in other orders. A merge that is exact by the luck of one processor's
rounding is not exact.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conversion.test_calibrated import OPTIONS, logits, relative
from tests.tiny import FAMILIES, MULTI_QUERY, convert, kv_settings, tiny_checkpoint, tiny_model
from upcycle.families import shape_of
from upcycle.heads import moments

LAST_BIT = 2.0**-23  # of an fp32 number, relative to it
FIVE_TOKENS = "abcde" * 200 + "edcbadbeca" * 40


def has_output_bias(name: str) -> bool:
    return shape_of(tiny_model(name).config.to_dict()).output_bias


OUTPUT_BIAS = [name for name in sorted(FAMILIES) if has_output_bias(name)]
# With norms, sinks and partly rotated heads.
OTHERS = [
    "llama",
    "glm",
    "glm4_moe",
    "gpt_oss",
    "hunyuan_v1_dense",
    "olmo2",
]
CASES = [*OUTPUT_BIAS, *(name for name in OTHERS if name not in OUTPUT_BIAS)]


class Folders:
    """A model of few KV heads and the same one with each of them copied."""

    def __init__(self, folder: Path, name: str) -> None:
        self.groups = 1 if name in MULTI_QUERY else 2
        self.text = folder / "text.txt"
        self.text.write_text(FIVE_TOKENS)
        self.raised, self.output = folder / "raised", folder / "out"
        grouped = tiny_checkpoint(folder / "grouped", name, **kv_settings(name, self.groups))
        convert(grouped, self.raised, kv_heads=8)
        self.expected = logits(grouped)

    def lost(self, method: str) -> float:
        """The relative distance of the logits after a conversion on five distinct tokens."""
        convert(
            self.raised,
            self.output,
            kv_heads=self.groups,
            method=method,
            calibration=[self.text],
            overwrite=True,
            **OPTIONS,
        )
        return relative(logits(self.output), self.expected)


def perturb(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every product of the moments is off by up to the last bit of an fp32 number."""
    products, generator = moments._products, torch.Generator().manual_seed(seed)

    def off(x: Tensor, y: Tensor | None = None) -> Tensor:
        found = products(x, y)
        noise = torch.rand(found.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return found * (1 + LAST_BIT * noise)

    monkeypatch.setattr(moments, "_products", off)


def test_there_are_families_with_an_output_bias() -> None:
    assert {"ernie4_5", "falcon", "gpt_oss", "starcoder2"} <= set(OUTPUT_BIAS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["lowrank", "procrustes"])
def test_five_tokens_and_other_last_bits_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    folders = Folders(tmp_path, name)
    assert folders.lost(method) <= 1e-5
    perturb(monkeypatch, seed=0)
    assert folders.lost(method) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUT_BIAS)
@pytest.mark.parametrize("method", ["lowrank", "procrustes"])
def test_a_hundred_draws_lose_nothing(tmp_path: Path, name: str, method: str) -> None:
    folders = Folders(tmp_path, name)
    for seed in range(100):
        with pytest.MonkeyPatch.context() as monkeypatch:
            perturb(monkeypatch, seed)
            assert folders.lost(method) <= 1e-5, seed
