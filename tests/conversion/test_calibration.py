"""Moments over calibration text equal those counted from a whole model's activations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.streams import kept, relative, some_ids
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.moments import calibrate
from upcycle.heads.blocks import split_planes
from upcycle.heads.moments import LayerMoments
from upcycle.models.loading import load_model
from upcycle.models.observed_attention import AttentionCall
from upcycle.progress import Progress

IDS = some_ids()
# One of each layout, norm and pairing, and the hybrids.
KINDS = (
    "llama", "qwen2", "phi", "phi3", "gpt_bigcode", "olmo", "olmo2", "cohere", "stablelm", "glm",
    "minimax_m2", "nanochat", "afmoe", "falcon_h1", "qwen3_next", "lfm2", "gpt_oss", "llama4_text",
)  # fmt: skip


def stream_of(folder: Path) -> LayerStream:
    checkpoint = Checkpoint.open(folder)
    return LayerStream(checkpoint, IDS.shape[1], device="cpu", dtype=torch.float64, chunk_rows=2)


def moments_of(folder: Path, **options: Any) -> dict[int, LayerMoments]:
    stream = stream_of(folder)
    return dict(calibrate(stream, stream.embed(IDS), **options))


def assert_identical(found: LayerMoments, expected: LayerMoments) -> None:
    for name, tensor in vars(expected).items():
        mine = getattr(found, name)
        assert torch.equal(mine, tensor) if isinstance(tensor, torch.Tensor) else mine == tensor


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_moments_are_those_of_the_whole_models_activations(tmp_path: Path, kv_heads: int) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2", num_key_value_heads=kv_heads)
    model = load_model(folder, dtype=torch.float64, attention="eager")
    attention = model.model.layers[1].self_attn
    with (
        kept(attention.q_proj) as (xs, qs),
        kept(attention.k_proj) as (_, ks),
        kept(attention.v_proj) as (_, vs),
        torch.no_grad(),
    ):
        probabilities = model(IDS, use_cache=False, output_attentions=True).attentions[1]
    found = moments_of(folder, attended_heads=2)[1]

    tokens = IDS.numel()
    assert found.tokens == tokens
    assert found.input_energy == pytest.approx(xs[0].square().mean().item())
    q, k, v = (out[0].reshape(tokens, -1, 8) for out in (qs, ks, vs))
    for plane in range(4):
        key = torch.complex(k[..., plane], k[..., plane + 4])
        query = torch.complex(q[..., plane], q[..., plane + 4])
        assert relative(found.keys[plane].real, (key.T @ key.conj() / tokens).real) < 1e-6
        assert relative(found.keys[plane].imag, (key.T @ key.conj() / tokens).imag) < 1e-6
        assert relative(found.queries[:, plane], query.abs().square().mean(0)) < 1e-6
    flat = v.flatten(1)
    assert relative(found.values, flat.T @ flat / tokens) < 1e-6
    assert relative(found.value_mean, flat.mean(0)) < 1e-6
    assert found.attended is not None
    for head in range(8):
        start = head // (8 // kv_heads) // 2 * 2
        block = v.view(*IDS.shape, kv_heads, 8)[:, :, start : start + 2].flatten(2)
        attended = (probabilities[:, head] @ block).flatten(0, 1)
        assert relative(found.attended[head], attended.T @ attended / tokens) < 1e-6


@pytest.mark.parametrize("model_type", KINDS)
def test_moments_are_those_of_what_the_class_attends_with(tmp_path: Path, model_type: str) -> None:
    folder = tiny_checkpoint(tmp_path, model_type)
    stream = stream_of(folder)
    hidden, calls = stream.embed(IDS), {}
    for layer in stream.layers():
        calls[layer.index] = seen = list[AttentionCall]()
        layer.advance(hidden, seen.append)
    found = moments_of(folder, attended_heads=8)
    assert found.keys() == {index for index, seen in calls.items() if seen}
    for index, moments in found.items():
        scores = [call.scores for call in calls[index] if call.scores is not None]
        query, key, value = (
            torch.cat([getattr(call, part) for call in scores]).transpose(0, 1).flatten(1, 2).mT
            for part in ("query", "key", "value")
        )  # [heads, channels, B T], after the rotation, which keeps a plane's energy
        rope = stream.attention_weights(index).rope
        if rope.pairing != "none":
            energy = split_planes(key, rope)[0].abs().square().mean(-1).T
            assert relative(moments.keys.diagonal(dim1=1, dim2=2).real, energy) < 1e-6
            energy = split_planes(query, rope)[0].abs().square().mean(-1)
            assert relative(moments.queries, energy) < 1e-6
        flat = value.flatten(0, 1)
        assert relative(moments.values, flat @ flat.T / flat.shape[1]) < 1e-9
        assert moments.attended is not None
        if len(key) == len(query):
            for head in (0, 7):
                y = torch.cat([call.attended(head) for call in scores]).flatten(0, 1)
                own = moments.attended[head].unflatten(0, (8, -1))[head]
                own = own.unflatten(1, (8, -1))[:, head]
                assert relative(own, y.T @ y / len(y)) < 1e-9


def test_the_same_text_gives_the_same_bits(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    first, second = moments_of(folder, attended_heads=2), moments_of(folder, attended_heads=2)
    for index in first:
        assert_identical(second[index], first[index])


@pytest.mark.parametrize("model_type", KINDS)
def test_a_resident_layers_weights_are_the_files(tmp_path: Path, model_type: str) -> None:
    stream = stream_of(tiny_checkpoint(tmp_path, model_type))
    for layer in stream.layers():
        if layer.attention is not None:
            stored, resident = stream.attention_weights(layer.index), stream.resident_weights(layer)
            for part in ("q", "k", "v", "o"):
                assert torch.equal(getattr(resident, part), getattr(stored, part).double())


def test_moments_need_no_second_copy_of_a_layer(tmp_path: Path) -> None:
    stream = stream_of(tiny_checkpoint(tmp_path, dtype=torch.bfloat16))
    with stream.layer(0) as layer:
        weights = stream.resident_weights(layer)
        own = {parameter.data_ptr() for parameter in layer.parameters.values()}
        assert len(own) == 4
        assert {weights.q.data_ptr(), weights.k.data_ptr(), weights.v.data_ptr()} <= own
    assert not layer.parameters, "weights that outlive the context"


def test_calibration_goes_on_after_the_last_layer_that_was_kept(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3)
    expected = moments_of(folder)
    stream = stream_of(folder)
    hidden = stream.embed(IDS)
    next(calibrate(stream, hidden))
    rest = dict(calibrate(stream_of(folder), hidden, start=1))
    assert list(rest) == [1, 2]
    for index, moments in rest.items():
        assert_identical(moments, expected[index])


def test_layers_without_attention_are_run_and_not_counted(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "lfm2")
    seen = list[Progress]()
    assert list(moments_of(folder, watch=seen.append)) == [1]
    assert [(moment.done, moment.total) for moment in seen] == [(1, 2), (2, 2)]


def test_attended_values_are_left_out_where_a_class_hides_its_probabilities(
    tmp_path: Path,
) -> None:
    folder = tiny_checkpoint(tmp_path, "falcon")
    found = moments_of(folder, attended_heads=2)
    assert [moments.attended for moments in found.values()] == [None, None]
