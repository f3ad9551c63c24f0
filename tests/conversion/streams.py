"""What the plain model computes, for tests of the layer stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from upcycle.conversion.layer_stream import LayerStream


def some_ids(rows: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(260, (rows, length), generator=torch.Generator().manual_seed(0))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def streamed(stream: LayerStream, ids: torch.Tensor) -> torch.Tensor:
    """The hidden states after the last layer."""
    hidden = stream.embed(ids)
    for layer in stream.layers():
        layer.advance(hidden)
    return hidden


def last_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same from the whole model, before its last norm."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    with kept(layers[-1]) as (inputs, outputs), torch.no_grad():
        model(ids, use_cache=False)
    del inputs
    return outputs[0]


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The hidden states that go into a module and come out of it."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hook = module.register_forward_hook(keep, with_kwargs=True)
    try:
        yield inputs, outputs
    finally:
        hook.remove()
