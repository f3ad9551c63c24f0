"""Trace a decoder, convert it to a Core ML program, and save that as a package."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from upcycle.export.decoder import (
    CAUSAL_MASK,
    INPUT_IDS,
    LOGITS,
    POSITION,
    StatefulDecoder,
    causal_mask,
)
from upcycle.export.quiet import quiet_coremltools, quiet_tracing

_DATE_KEY = "com.github.apple.coremltools.conversion_date"


def trace_decoder(decoder: StatefulDecoder, context: int) -> Any:
    """The TorchScript of one decoding step over a cache of `context` positions."""
    inputs = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        causal_mask(0, context),
    )
    with quiet_tracing(), torch.no_grad():
        # A check would compare two runs that differ by the cache that the first one wrote.
        return torch.jit.trace(  # type: ignore[no-untyped-call]
            decoder, inputs, check_trace=False
        )


def save_package(
    traced: Any,
    package: Path,
    *,
    states: Mapping[str, tuple[int, ...]],
    context: int,
    metadata: Mapping[str, str],
) -> None:
    """Convert a traced decoder to an iOS 18 program in fp16 and save it. Nothing is printed.

    Args:
        traced: of `trace_decoder`.
        package: the `.mlpackage` to write; the same inputs give the same bytes.
        states: shapes of the buffers that become states. They are fp16 in Core ML although the
            traced buffers are fp32: an fp16 buffer in an fp32 model does not convert.
        context: C, the last dimension of the mask.
        metadata: what to note in the package.
    """
    with quiet_coremltools():
        import coremltools as ct
        import numpy as np

        model = ct.convert(
            traced,
            inputs=[
                ct.TensorType(INPUT_IDS, (1, 1), dtype=np.int32),
                ct.TensorType(POSITION, (1,), dtype=np.int32),
                ct.TensorType(CAUSAL_MASK, (1, 1, 1, context), dtype=np.float16),
            ],
            outputs=[ct.TensorType(LOGITS, dtype=np.float16)],
            states=[
                ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
                for name, shape in states.items()
            ],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16,
            skip_model_load=True,  # loading is for the Mac's runtime
        )
        del model.user_defined_metadata[_DATE_KEY]
        model.user_defined_metadata.update(metadata)
        model.save(str(package))
    _fix_identifiers(package / "Manifest.json")


def _fix_identifiers(manifest: Path) -> None:
    """Name a package's items by their paths: random names would make every export differ."""
    document = json.loads(manifest.read_text(encoding="utf-8"))
    names = {
        name: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"]))
        for name, entry in document["itemInfoEntries"].items()
    }
    document["itemInfoEntries"] = {
        names[name]: entry for name, entry in document["itemInfoEntries"].items()
    }
    document["rootModelIdentifier"] = names[document["rootModelIdentifier"]]
    manifest.write_text(json.dumps(document, indent=4, sort_keys=True) + "\n", encoding="utf-8")
