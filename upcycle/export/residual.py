"""Keep the residual stream within fp16 by a factor that the logits do not see.

A norm of the residual stream gives the same for α·h as for h, once its ε is ε·α². So everything
that adds to the stream can be scaled by α: embeddings, the projections out of attention and MLP,
or the norms behind these. What reads the stream without a norm (post-norm models) is scaled by 1/α.
With α a power of two this is exact, but for the last bits of weights below 2^-14.

Writers and readers are observed in one forward pass, not looked up by a family's names; the logits
prove that none was missed.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError
from upcycle.export.layers import ScaledNorm, replace_modules
from upcycle.export.stream import Linear, ResidualStream
from upcycle.program.values import LARGEST_FP16

_COMFORTABLE = 2.0**13  # other tokens than those that were tried may go beyond these
_TOLERANCE = 1e-4  # of the range of the logits


class ScaledEmbedding(nn.Module):
    """An embedding times α. Its table may be the output head's too, and stays.

    Args:
        embedding: of tokens or positions.
        factor: α.
    """

    def __init__(self, embedding: nn.Module, factor: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [.., D]."""
        result: Tensor = self.embedding(ids) * self.factor
        return result


def fit_residual(model: Any, tokens: Tensor) -> float:
    """Scale the residual stream of a causal LM of transformers in place, if it gets too large.

    Args:
        model: with its norms guarded.
        tokens: [1, N], to see how large it gets.

    Returns:
        α, a power of two; 1 where nothing was done.

    Raises:
        ExportError: the stream passes what fp16 holds, and more than norms and linear layers
            depends on its size.
    """
    with torch.no_grad(), ResidualStream(model) as stream:
        expected = model(tokens, use_cache=False).logits
    if stream.peak <= _COMFORTABLE:
        return 1.0
    factor = 2.0 ** -math.ceil(math.log2(stream.peak / _COMFORTABLE))
    embeddings = replace_modules(
        model, lambda child: ScaledEmbedding(child, factor) if child in stream.embeddings else None
    )
    _scale_weights(stream, factor)
    with torch.no_grad(), ResidualStream(model) as scaled:
        difference = (model(tokens, use_cache=False).logits - expected).abs().max().item()
    limit = _TOLERANCE * (expected.max() - expected.min()).item()
    if difference <= limit and scaled.peak <= _COMFORTABLE:
        return factor
    if stream.peak > LARGEST_FP16:
        raise ExportError(
            f"the residual stream reaches {stream.peak:,.0f}, beyond fp16's {LARGEST_FP16:,}, and "
            f"cannot be scaled: more than norms and linear layers depends on its size",
            where=type(model).__name__,
            fix="export a model that normalises what it reads of the stream, such as Llama",
        )
    for embedding in embeddings:
        embedding.factor = 1.0
    _scale_weights(stream, 1 / factor)
    return 1.0


def _scale_weights(stream: ResidualStream, factor: float) -> None:
    with torch.no_grad():
        for reader in stream.readers:
            if isinstance(reader, Linear):
                reader.weight.div_(factor)
            else:
                _scale_epsilon(reader, factor)
        for writer in stream.writers:
            if isinstance(writer, Linear):
                writer.weight.mul_(factor)
                if writer.bias is not None:
                    writer.bias.mul_(factor)
            else:
                _scale_norm(writer, factor)


def _scale_epsilon(norm: Any, factor: float) -> None:
    if norm.eps is not None:  # else torch's own, which is next to nothing
        norm.eps *= factor**2


def _scale_norm(norm: nn.Module, factor: float) -> None:
    """Scale what a norm gives, which is x̂·w, or x̂·(1 + w) as in Gemma, and its bias."""
    plain: Any = norm.norm if isinstance(norm, ScaledNorm) else norm
    if getattr(plain, "weight", None) is None:
        return
    saved = plain.weight.clone()
    plain.weight.zero_()
    offset = float(norm(torch.linspace(-1, 1, len(saved), dtype=saved.dtype)).abs().max() > 0)
    plain.weight.copy_(factor * (saved + offset) - offset)
    if getattr(plain, "bias", None) is not None:
        plain.bias.mul_(factor)
