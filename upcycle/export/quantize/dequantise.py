"""The numbers that quantised weights stand for, as Core ML computes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.export.quantize.palette import fit_palette
from upcycle.export.quantize.schemes import Scheme
from upcycle.export.quantize.weights import WeightMatrix
from upcycle.program.values import LARGEST_FP16


def dequantise(weight: Tensor, scheme: Scheme) -> Tensor:
    """A weight [out, in] or [experts, out, in] as the package holds it, in fp16.

    Raises:
        ExportError: it is not finite in fp16.
    """
    half = weight.detach().half()
    if not half.isfinite().all():
        raise ExportError(
            "the weight is not finite in fp16",
            where=f"a weight of shape {list(weight.shape)}",
            fix=f"export a checkpoint whose weights are within +-{LARGEST_FP16}",
        )
    return _palette(half, scheme) if scheme.kind == "palette" else _linear(half, scheme)


def _palette(weight: Tensor, scheme: Scheme) -> Tensor:
    group = 1 if weight.ndim == 3 else scheme.group or len(weight)
    parts = []
    for part in weight.numpy().reshape(len(weight) // group, -1):
        table, indices = fit_palette(part, scheme.bits)
        parts.append(table[indices])
    return torch.from_numpy(np.stack(parts)).view(weight.shape)


def _linear(weight: Tensor, scheme: Scheme) -> Tensor:
    """Symmetric integers in +-(2^(bits-1) - 1), all in fp16 arithmetic, as coremltools has it."""
    blocks = weight.reshape(*weight.shape[:-1], -1, scheme.block or weight.shape[-1])
    largest = 2 ** (scheme.bits - 1) - 1
    scale = 2 * blocks.abs().amax(-1, keepdim=True) / (2 * largest)
    integers = torch.round(blocks / scale).clamp(-largest, largest)
    return torch.where(scale > 0, integers * scale, 0).flatten(-2)


@contextmanager
def dequantised(
    model: Any, weights: Mapping[str, WeightMatrix], schemes: Mapping[str, Scheme]
) -> Iterator[None]:
    """A model with some of its weights as the package would hold them, while the context lasts.

    Args:
        model: a causal LM of transformers in fp32.
        weights: of `find_weights`, by name.
        schemes: of `assign`, or some of them.

    Raises:
        ExportError: a weight is not finite in fp16.
    """
    saved = {name: model.get_parameter(name).data for name in schemes}
    try:
        dequantise_model(model, weights, schemes)
        yield
    finally:
        for name, data in saved.items():
            model.get_parameter(name).data = data


def dequantise_model(
    model: Any, weights: Mapping[str, WeightMatrix], schemes: Mapping[str, Scheme]
) -> None:
    """Replace a model's weights for good by what the package holds; arguments as above.

    Raises:
        ExportError: a weight is not finite in fp16.
    """
    for name, scheme in schemes.items():
        parameter = model.get_parameter(name)
        data = parameter.data.mT if weights[name].transposed else parameter.data
        found = dequantise(data, scheme).to(data.dtype)
        parameter.data = found.mT if weights[name].transposed else found
