"""Other forms of a model's linear layers, with the same results, for the Neural Engine's sake."""

from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError


class PointwiseConv(nn.Module):
    """A linear layer as a 1x1 convolution over [1, channels, 1, T], the engine's own layout.

    Args:
        linear: [D] to [E]; its weights are shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight[:, :, None, None])
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[.., E] of x, [.., D]."""
        columns = x.reshape(1, -1, x.shape[-1]).transpose(1, 2)[:, :, None]
        result = nn.functional.conv2d(columns, self.weight, self.bias)
        return result[:, :, 0].transpose(1, 2).reshape(*x.shape[:-1], -1)


class SplitLinear(nn.Module):
    """A linear layer as several with a part of the outputs each.

    Args:
        linear: [D] to [E]; its weights are shared.
        parts: how many, at most E; as equal as can be.
    """

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        weights = linear.weight.tensor_split(parts)
        biases = [None] * parts if linear.bias is None else linear.bias.tensor_split(parts)
        self.parts = nn.ModuleList(map(_linear, weights, biases))

    def forward(self, x: Tensor) -> Tensor:
        """[.., E] of x, [.., D]."""
        return torch.cat([part(x) for part in self.parts], -1)


def use_convolutions(model: Any) -> None:
    """Make every plain linear layer of a causal LM a convolution.

    An output head that shares the embedding's table stays: as a convolution it would have one of
    its own.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and id(child.weight) not in tables
    ]
    for parent, name, linear in found:
        setattr(parent, name, PointwiseConv(linear))


def split_output_head(model: Any, parts: int) -> None:
    """Split the output head of a causal LM; one that shares the embedding's table gets its own.

    Raises:
        ExportError: it has fewer rows than parts.
    """
    head = model.get_output_embeddings()
    if parts > len(head.weight):
        raise ExportError(
            f"an output head of {len(head.weight)} rows cannot have {parts} parts",
            where="--split-head",
            fix=f"pass {len(head.weight)} or less, or omit it",
        )
    model.set_output_embeddings(SplitLinear(head, parts))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
