"""Observed attention shows the probabilities that the class itself computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.streams import relative, some_ids
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_stream import LayerStream
from upcycle.errors import FamilyError
from upcycle.models.loading import load_model
from upcycle.models.observed_attention import AttentionCall, observed_attention

IDS = some_ids()
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "shared KV heads": ("llama", {"num_key_value_heads": 2}),
    "sliding window": ("mistral", {"sliding_window": 5}),
    "sliding window in some layers": ("qwen3", {**SLIDING, "use_sliding_window": True}),
    "softcap": ("gemma2", {**SLIDING, "attn_logit_softcapping": 2.0}),
    "sinks": ("gpt_oss", SLIDING),
    "layers without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "chunks": (
        "llama4_text",
        {
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "multi-query": ("gpt_bigcode", {"multi_query": True}),
    "gate": ("afmoe", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_are_those_of_the_class(tmp_path: Path, variant: str) -> None:
    model_type, settings = VARIANTS[variant]
    folder = tiny_checkpoint(tmp_path, model_type, **settings)
    stream = LayerStream(Checkpoint.open(folder), IDS.shape[1], device="cpu", chunk_rows=2)
    found = []

    def observer(call: AttentionCall) -> None:
        assert call.scores is not None
        heads = range(call.scores.query.shape[1])
        found.append(torch.stack([call.scores.probabilities(head) for head in heads], 1))

    hidden = stream.embed(IDS)
    for layer in stream.layers():
        layer.advance(hidden, observer)
    model = load_model(folder, dtype=torch.float32, attention="eager")
    with torch.no_grad():
        expected = model(IDS, use_cache=False, output_attentions=True).attentions
    by_layer = [torch.cat(found[i : i + 2]) for i in range(0, len(found), 2)]
    assert len(by_layer) == len(expected) == 2
    for probabilities, own in zip(by_layer, expected, strict=True):
        assert relative(probabilities, own) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gpt_bigcode", "falcon", "cohere"])
def test_an_attention_runs_again_as_it_was_called(tmp_path: Path, model_type: str) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, model_type))
    stream = LayerStream(checkpoint, IDS.shape[1], device="cpu", chunk_rows=1)
    calls: list[AttentionCall] = []
    with stream.layer(0) as layer, torch.no_grad():
        layer.advance(stream.embed(IDS), calls.append)
        inputs = torch.cat([call.inputs for call in calls])
        output = torch.cat([call.output for call in calls])
        for rows in (slice(None), slice(2), slice(1, 2), slice(None)):
            assert relative(layer.attend(inputs[rows]), output[rows]) < 1e-5


@pytest.mark.parametrize("extra", [{"softcap": 3.0}, {"s_aux": torch.randn(4)}])
def test_heads_one_by_one_give_what_all_give_at_once(extra: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    output, _ = observed_attention(torch.nn.Identity(), query, key, value, mask, 0.5, **extra)
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].mT * 0.5
        if "softcap" in extra:
            scores = 3 * (scores / 3).tanh()
        weights = (scores + mask[0]).exp()
        total = weights.sum(-1, keepdim=True)
        if "s_aux" in extra:
            total = total + extra["s_aux"][head].exp()
        assert relative(output[:, :, head], weights / total @ value[:, head // 2]) < 1e-5


@pytest.mark.parametrize("extra", [{"position_bias": 1}, {"dropout": 0.1}])
def test_an_unknown_feature_is_refused(extra: dict[str, Any]) -> None:
    x, mask = torch.randn(1, 2, 3, 4), torch.zeros(1, 1, 3, 3)
    with pytest.raises(FamilyError, match=next(iter(extra))):
        observed_attention(torch.nn.Identity(), x, x, x, mask, **extra)


def test_nothing_is_kept_of_a_call_that_nobody_watches(tmp_path: Path) -> None:
    stream = LayerStream(Checkpoint.open(tiny_checkpoint(tmp_path)), IDS.shape[1], device="cpu")
    with stream.layer(0) as layer:
        assert layer.attention is not None
        before = set(vars(layer.attention))
        hidden = stream.embed(IDS)
        layer.advance(hidden, lambda call: None)
        layer.advance(hidden)
        assert set(vars(layer.attention)) == before
