"""How large chunks of a model will be, and where to cut it so that they stay within a budget."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from upcycle.errors import ExportError
from upcycle.export.chunks.anatomy import Anatomy
from upcycle.export.quantize.preparation import Prepared
from upcycle.export.quantize.schemes import Role, Scheme
from upcycle.export.quantize.weights import WeightMatrix
from upcycle.export.request import functions_of
from upcycle.options.export import ExportOptions

_HALF = 2  # bytes
# A weight file aligns its records and their headers to 64 B. A compressed weight has two records,
# its bias another.
_RECORD = 6 * 64
_SMALL = 1 << 12  # axes, shapes and what else a converter stores


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights as they will be stored, at most.

    Attributes:
        layers: of each layer.
        before: of what only the first chunk needs.
        behind: of what only the last chunk needs.
        throughout: of what every chunk has.
        shared: of what the first and the last chunk both have, stored once if they are one.
    """

    layers: tuple[int, ...]
    before: int = 0
    behind: int = 0
    throughout: int = 0
    shared: int = 0

    def of(self, layers: range) -> int:
        """Bytes of a chunk."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        return (
            self.throughout
            + sum(self.layers[layer] for layer in layers)
            + first * self.before
            + last * self.behind
            - (first and last) * self.shared
        )


def stored_sizes(
    anatomy: Anatomy, num_masks: int, options: ExportOptions, prepared: Prepared | None
) -> Sizes:
    """The sizes of a model's parts, in fp16 or compressed.

    Args:
        anatomy: the model's.
        num_masks: mask inputs; what a call's tokens see of each other may be stored for each.
        options: those of the export.
        prepared: how its weights are quantised, None for fp16.
    """
    layers = [_stored([*layer.parameters(), *layer.buffers()]) for layer in anatomy.layers]
    before, behind = _stored(anatomy.before), _stored(anatomy.behind)
    shared = _shared(anatomy)
    for name, scheme in prepared.schemes.items() if prepared else ():
        assert prepared is not None
        weight = prepared.weights[name]
        saved = _saved(weight, scheme)
        if weight.layer is not None:
            layers[weight.layer] -= saved
            continue
        roles = _outer_roles(weight, prepared)
        before -= saved * ("embedding" in roles)
        behind -= saved * ("lm_head" in roles)
        shared -= saved * (len(roles) == 2)
    constants = max(functions_of(options).values()) ** 2 * _HALF * num_masks + _SMALL
    throughout = _stored(anatomy.throughout) + constants
    return Sizes(tuple(layers), before, behind, throughout, 0 if options.untie else shared)


def prepared_for(prepared: Prepared, layers: range, total: int) -> Prepared:
    """How the weights of a chunk are quantised.

    Args:
        prepared: of the whole model.
        layers: the chunk's.
        total: layers of the model.
    """

    def has(weight: WeightMatrix) -> bool:
        if weight.layer is not None:
            return weight.layer in layers
        roles = _outer_roles(weight, prepared)
        return ("embedding" in roles and layers.start == 0) or (
            "lm_head" in roles and layers.stop == total
        )

    weights = {name: weight for name, weight in prepared.weights.items() if has(weight)}
    schemes = {name: scheme for name, scheme in prepared.schemes.items() if name in weights}
    return replace(prepared, weights=weights, schemes=schemes)


def share_layers(sizes: Sizes, budget: int) -> list[range]:
    """The fewest runs of consecutive layers that are within a budget, each as long as it can be.

    Args:
        sizes: of the model.
        budget: bytes.

    Raises:
        ExportError: a layer alone is over the budget.
    """
    total = len(sizes.layers)
    largest = max(range(total), key=lambda layer: sizes.of(range(layer, layer + 1)))
    least = sizes.of(range(largest, largest + 1))
    if least > budget:
        names = [f"layer {largest}"]
        if largest == 0:
            names.append("the embedding")
        if largest == total - 1:
            names.append("the output head")
        raise ExportError(
            f"the weights of {' and '.join(names)} have {least:,} B, and the budget is "
            f"{budget:,} B",
            where="--chunk-size",
            fix=f"pass --chunk-size {least} or more",
        )
    parts, start = [], 0
    for stop in range(1, total + 1):
        if stop == total or sizes.of(range(start, stop + 1)) > budget:
            parts.append(range(start, stop))
            start = stop
    return parts


def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes in fp16; a converted matrix has a bias, of zeros where the model has none."""
    each = {id(tensor): tensor for tensor in tensors}
    return sum(
        _HALF * (tensor.numel() + (len(tensor) if tensor.ndim > 1 else 0)) + _RECORD
        for tensor in each.values()
    )


def _shared(anatomy: Anatomy) -> int:
    """Bytes of the matrices that have the same memory before and behind the layers."""
    places = {(tensor.data_ptr(), tensor.shape) for tensor in anatomy.before}
    return _stored(
        tensor for tensor in anatomy.behind if (tensor.data_ptr(), tensor.shape) in places
    )


def _outer_roles(weight: WeightMatrix, prepared: Prepared) -> set[Role]:
    """The roles of a weight outside the layers; a tied matrix has both but is noted with one."""
    tied = not any(each.role == "embedding" for each in prepared.weights.values())
    return {weight.role, "embedding"} if tied else {weight.role}


def _saved(weight: WeightMatrix, scheme: Scheme) -> int:
    """By how many bytes a compressed weight is smaller than in fp16."""
    elements = math.prod(weight.shape)
    if scheme.kind == "palette":
        channels = weight.shape[0] if weight.stacked else weight.channels
        group = 1 if weight.stacked else scheme.group or channels
        numbers = channels // group << scheme.bits
    else:
        numbers = elements // (scheme.block or weight.inputs)
    return _HALF * (elements - numbers) - elements * scheme.bits // 8
