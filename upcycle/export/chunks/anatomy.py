"""What there is to cut in a model, found by running it once."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError
from upcycle.export.decoder import CountLinears
from upcycle.export.quantize.weights import decoder_layers


@dataclass(frozen=True)
class Anatomy:
    """A causal LM of transformers as a row of layers with something before and something behind.

    Attributes:
        layers: the modules.
        width: D, the size of the hidden states.
        linear_counts: linear layers that are applied before each layer, and in all.
        before: parameters that are used before the layers.
        behind: parameters that are used after them.
        throughout: all other parameters and buffers outside the layers: each chunk may need them.
    """

    layers: tuple[Any, ...]
    width: int
    linear_counts: tuple[int, ...]
    before: tuple[Tensor, ...]
    behind: tuple[Tensor, ...]
    throughout: tuple[Tensor, ...]

    @classmethod
    def of(cls, decoder: Any) -> "Anatomy":
        """Run a decoder and see.

        Raises:
            ExportError: its layers give more than the hidden states.
        """
        model = decoder.model
        layers = tuple(decoder_layers(model)[1])
        with torch.no_grad(), CountLinears() as count, ExitStack() as hooks:
            observer = _Observer(model, layers, count, hooks)
            decoder(*decoder.example_inputs(1))
        outer = {id(tensor): tensor for tensor in _tensors_outside(model, layers)}
        before, behind = observer.used[0], observer.used[len(layers)]
        return cls(
            layers,
            observer.width,
            (*observer.linear_counts, count.linears),
            tuple(outer[key] for key in before),
            tuple(outer[key] for key in behind),
            tuple(tensor for key, tensor in outer.items() if key not in before | behind),
        )

    def linears(self, layers: range) -> int:
        """Linear layers that are applied from some layers' beginning to that of the next."""
        first = self.linear_counts[layers.start] if layers.start else 0
        return self.linear_counts[layers.stop] - first


class _Observer:
    """Notes what a model uses before its first layer, between layers, after the last.

    Args:
        model: the model.
        layers: its layers.
        count: counts its linear layers.
        hooks: takes the hooks, and removes them.

    Attributes:
        width: size of the hidden states.
        linear_counts: linear layers before each.
        used: ids of the parameters outside the layers, by how many layers had run before.
    """

    def __init__(
        self, model: nn.Module, layers: tuple[Any, ...], count: CountLinears, hooks: ExitStack
    ) -> None:
        self.width = 0
        self._finished = 0
        self.linear_counts: list[int] = []
        self.used: list[set[int]] = [set() for _ in range(len(layers) + 1)]
        self._count = count
        for module in _modules_outside(model, layers):
            hooks.enter_context(module.register_forward_pre_hook(self._before_outer))
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(self._before_layer))
            hooks.enter_context(layer.register_forward_hook(self._after_layer))

    def _before_outer(self, module: nn.Module, _: object) -> None:
        self.used[self._finished].update(map(id, module.parameters(recurse=False)))

    def _before_layer(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        self.width = given[0].shape[-1]
        self.linear_counts.append(self._count.linears)

    def _after_layer(self, layer: nn.Module, _: object, output: object) -> None:
        self._finished += 1
        if not isinstance(output, Tensor):
            raise ExportError(
                f"{type(layer).__name__} gives more than the hidden states to the next layer",
                where=f"layer {self._finished - 1}",
                fix="omit --chunk-size",
            )


def _modules_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _tensors_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[Tensor]:
    return [
        tensor
        for module in _modules_outside(model, layers)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]
