"""The decoder with a read-only past, fed by the host's cache, against the plain model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_model
from upcycle.errors import ExportError
from upcycle.export.decoder import decoder_shape
from upcycle.export.layers import guard_norms
from upcycle.export.masks import additive_mask
from upcycle.export.read_only import ReadOnlyDecoder
from upcycle.export.rotary import tabulate_rotary
from upcycle.models.qfold import register_attention_forms
from upcycle.options.attention_forms import FORMS, QFOLD
from upcycle.program.host_cache import HostCache, past_mask
from upcycle.program.noted import DecoderShape, check_manifest
from upcycle.program.signature import MASKED

CONTEXT = 32
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "phi": {},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, **SLIDING},
    "exaone4": SLIDING,
    "mistral": {"sliding_window": 6},
}


def read_only(model: nn.Module, attention: str) -> tuple[ReadOnlyDecoder, DecoderShape]:
    model.set_attn_implementation(attention)  # type: ignore[operator]
    tabulate_rotary(model, CONTEXT)
    guard_norms(model)
    shape = decoder_shape(model, CONTEXT)
    return ReadOnlyDecoder(model, shape, CONTEXT), shape


def run(decoder: ReadOnlyDecoder, cache: HostCache, calls: Iterator[Tensor]) -> Tensor:
    """Logits [N, vocabulary] of tokens given in calls of several."""
    logits = []
    for tokens in calls:
        signature = decoder.signature(tokens.shape[1])
        given = cache.inputs(tokens.int().numpy())
        arguments = [torch.from_numpy(given[name]) for name, _, _ in signature.inputs]
        for argument, (_, size, dtype) in zip(arguments, signature.inputs, strict=True):
            assert tuple(argument.shape) == size
            assert argument.dtype == (torch.int32 if dtype == "int32" else argument.dtype)
        outputs = dict(zip(signature.outputs, decoder(*arguments), strict=True))
        logits.append(outputs.pop("logits")[0])
        cache.append({name: value.numpy() for name, value in outputs.items()})
    return torch.cat(logits)


def host_cache(shape: DecoderShape) -> HostCache:
    """With fp32 arrays, so that it rounds nothing."""
    decoder = {"decoder": shape.document}
    document = {"source": {}, "options": {"context": CONTEXT}, "result": decoder}
    cache = HostCache.of(check_manifest(document, ""))
    past = {name: array.astype(np.float32) for name, array in cache.past.items()}
    return HostCache(past, cache.windows)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_models_logits(family: str, attention: str) -> None:
    register_attention_forms()
    model = tiny_model(family, num_key_value_heads=2, **FAMILIES[family])
    tokens = torch.randint(0, 260, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
        decoder, shape = read_only(model, attention)
        calls = iter([tokens[:, :8], tokens[:, 8:16], *tokens[:, 16:].split(1, dim=1)])
        logits = run(decoder, host_cache(shape), calls)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_a_padded_prefill_keeps_only_the_prompt() -> None:
    register_attention_forms()
    model = tiny_model("llama", num_key_value_heads=2)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).logits[0]
        decoder, shape = read_only(model, QFOLD.name)
        cache = host_cache(shape)
        prompt = torch.nn.functional.pad(tokens[:, :5], (0, 3), value=17)
        given = [torch.from_numpy(x) for x in cache.inputs(prompt.int().numpy()).values()]
        outputs = dict(zip(decoder.signature(8).outputs, decoder(*given), strict=True))
        cache.append({name: value.numpy() for name, value in outputs.items()}, count=5)
        assert cache.length == 5
        logits = run(decoder, cache, iter(tokens[:, 5:].split(1, dim=1)))
    torch.testing.assert_close(logits, expected[5:], rtol=1e-3, atol=1e-4)


def test_the_cache_ends() -> None:
    cache = HostCache({"keyCache0": np.zeros((1, 1, 4, 2), np.float16)}, {"causalMask": None})
    cache.length = 2
    assert cache.inputs(np.zeros((1, 2), np.int32))["position"] == [2]
    with pytest.raises(ExportError, match="3 tokens after 2 pass the context of 4"):
        cache.inputs(np.zeros((1, 3), np.int32))


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("position", "queries"), [(0, 1), (7, 1), (0, 5), (6, 5)])
def test_both_masks_together_are_the_one_over_all(
    position: int, queries: int, window: int | None
) -> None:
    past = torch.from_numpy(past_mask(position, queries, CONTEXT, window)).float()
    new = additive_mask(0, queries, queries, window)
    expected = additive_mask(position, queries, CONTEXT, window)
    filled = past.clone()
    assert (filled[..., position:] == MASKED).all()
    filled[..., position : position + queries] = new
    torch.testing.assert_close(filled, expected)
