"""Decoders cut into chunks, in torch: chained they are the model, whatever its layers are like."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.export.families import EXPORTED, exported_checkpoint
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.chunks.anatomy import Anatomy
from upcycle.export.chunks.decoders import ChunkDecoder, cut_decoder
from upcycle.export.chunks.sizes import stored_sizes
from upcycle.export.loading import load_decoder
from upcycle.options.export import ExportOptions

CONTEXT, TOKENS = 32, torch.tensor([[3, 1, 4, 1, 5]], dtype=torch.int32)
FAMILIES = ("cohere2", "gemma3_text", "gpt2", "gpt_oss", "nanochat", "olmo2", "smollm3")


def load(folder: Path, **options: Any) -> Any:
    return load_decoder(
        Checkpoint.open(folder), ExportOptions(context=CONTEXT, chunk_size=1, **options)
    )


def by_layer(whole: Any) -> list[ChunkDecoder]:
    """A chunk for each layer."""
    anatomy = Anatomy.of(whole)
    count = whole.shape.num_layers
    return [ChunkDecoder(whole, anatomy, range(i, i + 1), 0).eval() for i in range(count)]


def logits(decoder: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = decoder(tokens, *decoder.example_inputs(tokens.shape[1])[1:])
    return found if isinstance(found, Tensor) else found[0]


def chained(chunks: list[ChunkDecoder], tokens: Tensor) -> Tensor:
    passed = tokens
    for chunk in chunks:
        passed = logits(chunk, passed)
    return passed


@pytest.mark.parametrize("kv_cache", ["state", "read-only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chained_layers_are_the_model(family: str, kv_cache: str, tmp_path: Path) -> None:
    assert family in EXPORTED
    whole = load(exported_checkpoint(tmp_path / "source", family), kv_cache=kv_cache)
    chunks = by_layer(whole)
    assert sum(chunk.shape.num_linears for chunk in chunks) == whole.shape.num_linears
    assert {name for chunk in chunks for name in chunk.shape.masks} == set(whole.shape.masks)
    assert torch.equal(chained(chunks, TOKENS), logits(whole, TOKENS))


def test_signatures_have_the_models_layer_numbers(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_key_value_heads=2)
    whole = load(source, kv_cache="read-only", argmax=True)
    first, last = (chunk.signature(3) for chunk in by_layer(whole))
    names = [each.name for each in first.inputs]
    assert names == ["inputIds", "position", "keyCache0", "valueCache0", "causalMask"]
    assert first.outputs == ("newHidden", "newKey0", "newValue0")
    names = [each.name for each in last.inputs]
    assert names == ["hidden", "position", "keyCache1", "valueCache1", "causalMask"]
    assert last.inputs[0].shape == (1, 3, 64)
    assert last.outputs == ("logits", "newKey1", "newValue1", "nextToken")


def remember(whole: Any) -> None:
    """Make the second layer add what the first one got, as some models do."""
    first, second = whole.model.model.layers
    seen: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    second.register_forward_hook(lambda *call: call[-1] + seen[-1])


def give_pairs(whole: Any) -> None:
    whole.model.model.layers[1].register_forward_hook(lambda *call: (call[-1], None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remember, r"the chunks, whose layers know more of each other"),
        (give_pairs, r"LlamaDecoderLayer gives more than the hidden states"),
    ],
)
def test_layers_that_share_more_than_hidden_states_are_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    whole = load(tiny_checkpoint(tmp_path / "source"))
    options = ExportOptions(context=CONTEXT)
    sizes = stored_sizes(Anatomy.of(whole), 1, options, None)
    change(whole)
    with pytest.raises(ExportError, match=message):
        cut_decoder(whole, ExportOptions(context=CONTEXT, chunk_size=sizes.of(range(2)) - 1))


def test_the_model_is_whole_again_afterwards(tmp_path: Path) -> None:
    whole = load(tiny_checkpoint(tmp_path / "source"))
    expected = logits(whole, TOKENS)
    chunks = by_layer(whole)
    with pytest.raises(RuntimeError):
        chunks[1](torch.zeros(1, 5, 3), *chunks[1].example_inputs(5)[1:])
    assert torch.equal(logits(whole, TOKENS), expected)
