"""The layer stream computes what the whole model does, with one layer in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.streams import last_hidden, relative, some_ids, streamed
from tests.families.retarget_sources import SOURCES, source_checkpoint, view_of
from tests.tiny import FAMILIES, convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_stream import LayerStream
from upcycle.errors import CheckpointError, DataError
from upcycle.models.loading import load_model, model_of

IDS = some_ids()
LENGTH = IDS.shape[1]


def stream_of(folder: Path, dtype: torch.dtype = torch.float32) -> LayerStream:
    return LayerStream(Checkpoint.open(folder), LENGTH, device="cpu", dtype=dtype, chunk_rows=2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_hidden_states_are_the_whole_models(tmp_path: Path, model_type: str) -> None:
    folder = tiny_checkpoint(tmp_path, model_type)
    model = load_model(folder, dtype=torch.float32, attention="eager")
    assert relative(streamed(stream_of(folder), IDS), last_hidden(model, IDS)) < 1e-5


@pytest.mark.parametrize("name", SOURCES)
def test_a_retargeted_view_streams_too(tmp_path: Path, name: str) -> None:
    view = view_of(source_checkpoint(tmp_path, name))
    stream = LayerStream(view, LENGTH, device="cpu", dtype=torch.float64)
    model = model_of(view.config, {tensor: view.read(tensor) for tensor in view.tensors})
    assert relative(streamed(stream, IDS), last_hidden(model, IDS)) < 1e-6  # fp32 rotary angles


def test_weights_are_widened_as_the_whole_models_are(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.float32)
    assert relative(streamed(stream_of(folder), IDS), last_hidden(model, IDS)) < 1e-5


def test_a_checkpoint_of_the_bare_model_streams_too(tmp_path: Path) -> None:
    whole, bare = tiny_checkpoint(tmp_path / "whole"), tiny_checkpoint(tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    tensors = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(tensors, bare / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(streamed(stream_of(bare), IDS), streamed(stream_of(whole), IDS))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "dots1"])
def test_one_layer_is_in_memory(tmp_path: Path, model_type: str) -> None:
    folder = tiny_checkpoint(tmp_path, model_type, num_hidden_layers=4)
    sizes = {
        index: sum(p.nbytes for p in layer.parameters())
        for index, layer in enumerate(load_model(folder, dtype=torch.float32).model.layers)
    }
    stream = stream_of(folder)

    def live() -> int:
        parameters = stream._model.model.parameters()
        return sum(p.nbytes for p in parameters if p.device.type != "meta")

    hidden = stream.embed(IDS)
    outside = live()
    assert outside == hidden.shape[-1] * 4  # the last norm
    for layer in stream.layers():
        layer.advance(hidden)
        assert live() == outside + sizes[layer.index]
    assert live() == outside


def test_a_stream_goes_on_from_any_layer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3)
    stream, hidden = stream_of(folder), stream_of(folder).embed(IDS)
    with stream.layer(0) as layer:
        layer.advance(hidden)
    again = stream_of(folder)
    for layer in again.layers(start=1):
        layer.advance(hidden)
    assert torch.equal(hidden, streamed(stream, IDS))


@pytest.mark.parametrize(
    ("model_type", "kv_heads"), [("llama", 2), ("stablelm", 2), ("falcon", 1), ("phi3", 4)]
)
def test_converted_tensors_stand_for_the_sources(
    tmp_path: Path, model_type: str, kv_heads: int
) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type)
    convert(source, tmp_path / "converted", kv_heads=kv_heads)
    expected = Checkpoint.open(tmp_path / "converted")
    as_converted = replace(Checkpoint.open(source), config=expected.config)
    stream = LayerStream(as_converted, LENGTH, device="cpu", chunk_rows=2)
    hidden = stream.embed(IDS)
    for index in range(stream.num_layers):
        part = f".{index}.self_att"
        replaced = {name: expected.read(name) for name in expected.tensors if part in name}
        with stream.layer(index, replaced) as layer:
            layer.advance(hidden)
    assert torch.equal(hidden, streamed(stream_of(tmp_path / "converted"), IDS))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        streamed(stream_of(folder), IDS)


def test_a_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    stream = stream_of(tiny_checkpoint(tmp_path))
    with pytest.raises(DataError, match="token 260, the model's embedding 260 rows"):
        stream.embed(torch.full((1, LENGTH), 260))
