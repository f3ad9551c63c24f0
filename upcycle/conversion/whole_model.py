"""Outputs of a checkpoint in fp64 through transformers' own class, whole or its first layers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError
from upcycle.families import shape_of
from upcycle.models.loading import classes_of, model_of

# Beyond this many parameters only the first layers are built: what is checked is done to every
# layer in the same way.
_WHOLE_MODEL = 250_000_000
_FEW_LAYERS = 2
_PROBE_TOKENS = 48
HIDDEN = "hidden states"
_LAYER = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer")


def layers_to_build(checkpoint: Checkpoint) -> int | None:
    """How many layers to build, with at least one attention among them; None for all."""
    if checkpoint.num_parameters <= _WHOLE_MODEL:
        return None
    return max(_FEW_LAYERS, shape_of(checkpoint.config).attention_layers[0] + 1)


@dataclass(frozen=True)
class Outputs:
    """What a model gives for random tokens.

    Attributes:
        tensors: logits [B, T, V], or the last hidden states [B, T, D] of a bare model, in fp64.
        kind: which of them, in words.
    """

    tensors: tuple[Tensor, ...]
    kind: str


def fp64_outputs(
    checkpoint: Checkpoint,
    layers: int | None,
    replaced: Mapping[str, Tensor] | None = None,
    *,
    classes: Sequence[Any] = (),
) -> Outputs:
    """A model's outputs for random tokens, in fp64.

    Args:
        checkpoint: what to build.
        layers: how many of its first layers; all where None.
        replaced: tensors that stand for the checkpoint's own of the same names.
        classes: of transformers, the first that is complete is built; those of `classes_of` where
            empty.

    Raises:
        CheckpointError: tensors of each class are missing or have another shape.
    """
    names = [name for name in checkpoint.tensors if layers is None or _layer(name) < layers]
    replaced = replaced or {}
    tensors = {
        name: _widened(replaced[name] if name in replaced else checkpoint.read(name))
        for name in names
    }
    config = _shortened(checkpoint.config, layers)
    model = _first_complete(config, tensors, classes or classes_of(config))
    generator = torch.Generator().manual_seed(0)
    length = min(_PROBE_TOKENS, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        found = model(ids, use_cache=False)
    outputs = tuple(each for each in found.to_tuple() if isinstance(each, Tensor))
    return Outputs(outputs, HIDDEN if "last_hidden_state" in found else "logits")


def _first_complete(
    config: Mapping[str, Any], tensors: dict[str, Tensor], classes: Sequence[Any]
) -> Any:
    """The model of the first class that the tensors are enough for."""
    first: CheckpointError | None = None
    for model_class in classes:
        try:
            return model_of(config, tensors, model_class)
        except CheckpointError as error:
            first = first or error
    assert first is not None
    raise first


def relative_differences(found: Outputs, expected: Outputs) -> float:
    """The largest `relative_difference` of all outputs."""
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return max(relative_difference(one, other) for one, other in pairs)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors [...], relative to the largest of `expected`."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def describe(layers: int | None) -> str:
    """Which layers were built, in words."""
    return "all layers" if layers is None else f"the first {layers} layers"


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """The configuration of a model with the first layers, in every list that has one per layer."""
    if layers is None:
        return dict(config)
    counts = {key: config[key] for key in _LAYER_COUNTS if key in config}
    lists = {
        key: value[:layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) in counts.values()
    }
    return {**config, **lists, **dict.fromkeys(counts, layers)}
