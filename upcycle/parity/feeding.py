"""Feed tokens to an exported program, through prefill and decode, whatever its kind of cache."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from upcycle.export.masks import additive_mask
from upcycle.program.graph import Graph
from upcycle.program.host_cache import new_names, past_names
from upcycle.program.noted import ExportManifest
from upcycle.program.signature import (
    DECODE,
    INPUT_IDS,
    LOGITS,
    MASKED,
    POSITION,
    PREFILL,
)


class Runner(Protocol):
    """Something that runs the functions of a program and keeps its states."""

    def run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call a function by its name."""

    def reset(self) -> None:
        """Empty the states."""

    def state(self, name: str) -> Tensor:
        """The content of a state."""


class Feed:
    """A program, its cache and the position of its next token.

    Args:
        runner: runs the program, its states empty.
        graph: of the package.
        manifest: of the package.
        start: position of the first token; the positions before it are hidden.
    """

    def __init__(
        self, runner: Runner, graph: Graph, manifest: ExportManifest, start: int = 0
    ) -> None:
        self._runner = runner
        self._graph = graph
        self._windows = manifest.result.decoder.masks
        self._context = manifest.options.context
        self._layers = manifest.result.decoder.num_layers
        self._start = start
        self._position = start
        decode = graph.functions[DECODE]
        self._past = {
            name: torch.zeros([size or 0 for size in decode.types[name].shape])
            for name in past_names(self._layers)
            if name in decode.inputs
        }

    def prefill(self, tokens: Tensor, size: int) -> Tensor:
        """Logits [N, vocabulary] of tokens [N], a multiple of the size of a call."""
        return torch.cat([self._call(PREFILL, part) for part in torch.split(tokens, size)])

    def decode(self, tokens: Tensor) -> Tensor:
        """Logits [N, vocabulary] of tokens [N], one by one."""
        return torch.cat([self._call(DECODE, token) for token in torch.split(tokens, 1)])

    def caches(self) -> dict[str, Tensor]:
        """K and V of the positions filled so far, [.., g, N, ..] per layer or for all layers."""
        filled = slice(self._start, self._position)
        states = self._graph.functions[DECODE].states
        found = self._past or {name: self._runner.state(name) for name in states}
        return {name: value[:, :, filled].float().clone() for name, value in found.items()}

    def _call(self, name: str, tokens: Tensor) -> Tensor:
        outputs = self._runner.run(name, self._inputs(tokens))
        new = slice(self._position, self._position + len(tokens))
        if self._past:
            for past, made in zip(self._past.values(), new_names(self._layers), strict=True):
                past[:, :, new] = outputs[made]
        self._position += len(tokens)
        return outputs[LOGITS][0].float()

    def _inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        masks = {name: self._mask(len(tokens), window) for name, window in self._windows.items()}
        return {
            INPUT_IDS: tokens[None].int(),
            POSITION: torch.tensor([self._position], dtype=torch.int32),
            **masks,
            **self._past,
        }

    def _mask(self, queries: int, window: int | None) -> Tensor:
        mask = additive_mask(self._position, queries, self._context, window)
        mask[..., : self._start] = MASKED
        if self._past:  # what the new tokens see of each other is no part of it
            mask[..., self._position :] = MASKED
        return mask
