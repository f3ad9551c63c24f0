"""huggingface/transformers#39972: Gemma 3's residual stream passes 65,504, all that fp16 holds."""

import torch

from tests.tiny import tiny_model
from upcycle.export.layers import guard_norms
from upcycle.export.residual import fit_residual
from upcycle.export.stream import ResidualStream

TOKENS = torch.arange(8)[None]


def test_the_stream_is_scaled_into_fp16_and_the_logits_stay() -> None:
    model = tiny_model("gemma3_text", num_key_value_heads=2)
    guard_norms(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.norm.weight.fill_(1e5)
        with ResidualStream(model) as before:
            expected = model(TOKENS).logits
        assert before.peak > 65_504
        fit_residual(model, TOKENS)
        with ResidualStream(model) as after:
            logits = model(TOKENS).logits
    assert after.peak < 65_504 / 2
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
