"""The proof that a retargeted checkpoint computes what its source computes."""

import torch

from upcycle.checkpoint.headers import TORCH_DTYPES
from upcycle.checks import Check
from upcycle.conversion.whole_model import (
    HIDDEN,
    describe,
    fp64_outputs,
    layers_to_build,
    relative_differences,
)
from upcycle.families.retargets.view import RetargetedCheckpoint, retargeted
from upcycle.models.loading import class_config, plain_classes

RETARGETED_LIMIT = 1e-10
STORED_LIMIT = 16  # units of the stored dtype's precision


def check_retarget(view: RetargetedCheckpoint) -> list[Check]:
    """The outputs of the retargeted model against the source's, before any head is merged.

    Both run in fp64 through transformers' own classes: once with the numbers as they are
    computed, and once as they are stored.

    Args:
        view: the source as the target class sees it.
    """
    source = view.original
    layers = layers_to_build(source)
    made = fp64_outputs(view, layers)
    # The source's own class may be bare where the target's has a head that is its embedding.
    causal, bare = plain_classes(class_config(source.config))
    expected = fp64_outputs(source, layers, classes=[bare if made.kind == HIDDEN else causal])
    wide = fp64_outputs(retargeted(source, "float64"), layers)
    exact = relative_differences(wide, expected)
    stored = relative_differences(made, expected)
    coarsest = max(
        torch.finfo(getattr(torch, TORCH_DTYPES[tensor.dtype])).eps
        for tensor in view.tensors.values()
    )
    before, after = source.config["model_type"], view.config["model_type"]
    extent = describe(layers)
    return [
        Check(
            f"{before} computes the same as {after} before merging",
            exact,
            RETARGETED_LIMIT,
            f"largest difference of {made.kind} relative to the largest, {extent}, fp64",
        ),
        Check(
            f"{after} as stored is the same within its dtype's precision",
            stored,
            max(STORED_LIMIT * coarsest, RETARGETED_LIMIT),
            f"{STORED_LIMIT} units of {coarsest:.1e}, {extent}",
        ),
    ]
