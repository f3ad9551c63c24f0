"""Which layers suffer most when they are quantised, measured on text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.export.quantize.dequantise import dequantised
from upcycle.export.quantize.schemes import Scheme
from upcycle.export.quantize.weights import WeightMatrix, decoder_layers
from upcycle.progress import Progress, Watcher, ignore


@dataclass(frozen=True)
class Sensitivity:
    """What quantising each layer alone does to the logits.

    Attributes:
        tokens: tokens of text that were predicted.
        kl: per layer, mean KL(model || model with this layer quantised), nats per token.
    """

    tokens: int
    kl: tuple[float, ...]

    @property
    def ranking(self) -> tuple[int, ...]:
        """Layers, the most sensitive first."""
        return tuple(sorted(range(len(self.kl)), key=lambda layer: (-self.kl[layer], layer)))


@torch.inference_mode()
def measure_sensitivity(
    model: Any,
    weights: Mapping[str, WeightMatrix],
    schemes: Mapping[str, Scheme],
    rows: Tensor,
    watch: Watcher = ignore,
) -> Sensitivity:
    """Quantise one layer after the other and compare the logits with the model's own.

    What the layers below a quantised one give is computed once and kept.

    Args:
        model: a causal LM of transformers in fp32; unchanged afterwards.
        weights: of `find_weights`, by name.
        schemes: of `assign`, without promotion.
        rows: [B, T] token ids.
        watch: told of each layer.
    """
    _, layers = decoder_layers(model)
    outputs: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(call[-1])) for layer in layers
    ]
    reference = log_probabilities(model, rows)
    for hook in hooks:
        hook.remove()
    found = []
    for index in range(len(layers)):
        watch(Progress("sensitivity", index, len(layers), "layers"))
        own = {name: scheme for name, scheme in schemes.items() if weights[name].layer == index}
        if not own:
            found.append(0.0)
            continue
        with _replayed(layers[:index], outputs), dequantised(model, weights, own):
            found.append(mean_divergence(reference, log_probabilities(model, rows)))
    watch(Progress("sensitivity", len(layers), len(layers), "layers"))
    return Sensitivity(rows.numel(), tuple(found))


def log_probabilities(model: Any, rows: Tensor) -> Tensor:
    """The model's next-token log-probabilities [B, T, V] over rows of token ids [B, T]."""
    logits: Tensor = model(input_ids=rows, use_cache=False).logits
    return logits.float().log_softmax(-1)


def mean_divergence(reference: Tensor, other: Tensor) -> float:
    """Mean KL(reference || other) over all tokens, nats, of log-probabilities [B, T, V]."""
    return float((reference.exp() * (reference - other)).sum(-1).mean())


@contextmanager
def _replayed(
    layers: nn.ModuleList | Sequence[nn.Module], outputs: Sequence[Any]
) -> Iterator[None]:
    """Layers that give what they gave before, at once."""
    for layer, output in zip(layers, outputs, strict=False):
        layer.__dict__["forward"] = lambda *_, kept=output, **__: kept
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]
