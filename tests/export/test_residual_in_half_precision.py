"""Scaling the residual stream leaves the logits and brings it into fp16's range."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_model
from upcycle.errors import ExportError
from upcycle.export.layers import guard_norms
from upcycle.export.residual import fit_residual
from upcycle.export.stream import Linear, ResidualStream

TOKENS = torch.arange(9)[None]


def stream_of(model: Any) -> tuple[ResidualStream, Tensor]:
    with torch.no_grad(), ResidualStream(model) as stream:
        logits = model(TOKENS).logits
    return stream, logits


def grow(model: Any, peak: float) -> None:
    """Let the first layer write a stream of about this size, by whatever it writes with."""
    for wanted in (1e7, peak):
        stream, _ = stream_of(model)
        for writer in stream.writers[:2]:
            plain: Any = getattr(writer, "norm", writer)
            plain.weight.data.mul_(wanted / stream.peak)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("gemma", {}),
        ("gemma2", {"head_dim": 16}),
        ("phi", {}),
        ("cohere", {}),
        ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
        ("stablelm", {}),
        ("starcoder2", {}),
        ("olmo2", {}),
        ("exaone4", {}),
    ],
)
def test_logits_stay_and_the_stream_fits(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, num_key_value_heads=2, **settings)
    guard_norms(model)
    grow(model, 4e5)
    before, expected = stream_of(model)
    assert before.peak > 65504
    factor = fit_residual(model, TOKENS)
    assert factor < 0.2
    after, logits = stream_of(model)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    assert after.peak == pytest.approx(before.peak * factor, rel=1e-3)
    assert after.peak <= 2**13


def test_a_small_stream_is_left_alone() -> None:
    model = tiny_model("llama")
    before = [parameter.clone() for parameter in model.parameters()]
    assert fit_residual(model, TOKENS) == 1
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_every_writer_and_reader_of_a_llama_is_seen() -> None:
    model = tiny_model("llama")
    guard_norms(model)
    stream, _ = stream_of(model)
    written = [part.weight for part in stream.writers if isinstance(part, Linear)]
    layers = model.model.layers
    expected = [m.weight for x in layers for m in (x.self_attn.o_proj, x.mlp.down_proj)]
    assert [id(x) for x in written] == [id(x) for x in expected]
    norms = [m for x in layers for m in (x.input_layernorm, x.post_attention_layernorm)]
    assert stream.readers == [*norms, model.model.norm]
    assert stream.embeddings == [model.model.embed_tokens]


class Squashed(nn.Module):
    """Reads the size of its input."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.size)


@pytest.mark.parametrize("peak", [2e5, 2e4])
def test_what_depends_on_the_size_is_refused_or_left_alone(peak: float) -> None:
    model = tiny_model("llama")
    guard_norms(model)
    grow(model, peak)
    model.model.norm = Squashed(peak)
    stream, expected = stream_of(model)
    if peak > 65504:
        assert stream.peak > 65504
        with pytest.raises(ExportError, match=r"residual stream reaches .* cannot be scaled"):
            fit_residual(model, TOKENS)
    else:
        assert 2**13 < stream.peak <= 65504
        assert fit_residual(model, TOKENS) == 1
        torch.testing.assert_close(model(TOKENS).logits, expected)
