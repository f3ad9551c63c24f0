"""What `inspect` and `capacity` say that weights take is what a conversion writes."""

from pathlib import Path

import pytest

from tests.families.retarget_sources import SOURCES, source_checkpoint
from tests.predictors import with_predictor
from tests.tiny import FAMILIES, convert, tiny_checkpoint
from upcycle.attention import AttentionShape, Rope
from upcycle.checkpoint.reader import Checkpoint
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.kvcache.weights import Weights, weights_of
from upcycle.planning import plan


def check_sizes(source: Path, out: Path) -> None:
    checkpoint = Checkpoint.open(source)
    inspection, weights = inspect_checkpoint(checkpoint), weights_of(checkpoint)
    for choice in inspection.choices:
        planned = plan(checkpoint, kv_heads=choice.kv_heads).output_bytes
        assert choice.weight_bytes_saved == checkpoint.weight_bytes - planned
        now = choice.kv_heads == inspection.shape.num_key_value_heads
        stored = checkpoint.weight_bytes if now else planned
        assert weights.bytes_with(inspection.shape, choice.kv_heads) == stored
    least = inspection.choices[-1]
    convert(source, out, kv_heads=least.kv_heads)
    written = Checkpoint.open(out).weight_bytes
    assert least.weight_bytes_saved == checkpoint.weight_bytes - written


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_of_every_family(tmp_path: Path, model_type: str) -> None:
    check_sizes(tiny_checkpoint(tmp_path / "source", model_type), tmp_path / "out")


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_of_every_class_that_becomes_another(tmp_path: Path, name: str) -> None:
    check_sizes(source_checkpoint(tmp_path / "source", name), tmp_path / "out")


@pytest.mark.parametrize("block", ["mtp.layers.0", "model.layers.2"])
def test_with_blocks_beside_the_decoder(tmp_path: Path, block: str) -> None:
    source = with_predictor(tmp_path / "source", "glm4_moe", block)
    check_sizes(source, tmp_path / "out")
    saved = {
        c.kv_heads: c.weight_bytes_saved
        for c in inspect_checkpoint(Checkpoint.open(source)).choices
    }
    assert saved[2] == 3 * 2 * (4 - 2) * 8 * 64 * 4  # three attentions, K and V, fp32


def test_the_biases_that_phi_adds_to_gpt_j_are_not_saved(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gptj")
    checkpoint = Checkpoint.open(source)
    choice = next(c for c in inspect_checkpoint(checkpoint).choices if c.kv_heads == 2)
    biases = 3 * (48 + 2 * 24 + 48)
    assert choice.weight_bytes_saved == 8 * (3 * 2 * 24 * 48 - biases)  # in fp64


def test_heads_that_gpus_share_are_counted_by_what_each_adds() -> None:
    shape = AttentionShape(
        num_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=2, value_head_dim=2,
        hidden_size=8, rope=Rope("half", 2), qkv_bias=False, output_bias=False,
    )  # fmt: skip
    weights = Weights(1000, 4, {1: 700, 2: 800, 4: 1000})
    assert [weights.kv_bytes(shape, g) for g in (1, 2, 4)] == [100, 200, 400]
    # One KV head on both GPUs: 600 of all else split, 100 on each.
    assert weights.bytes_per_gpu(shape, 1, 1, 2) == 300 + 100
