"""Trace a decoder, convert it to Core ML programs, and save those as one package."""

import errno
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from upcycle.checkpoint.staging import scratch_folder
from upcycle.errors import ExportError
from upcycle.export.checks import check_sharing
from upcycle.export.decoder import as_tuple
from upcycle.export.precision import lean_overflow_probe
from upcycle.export.quiet import quiet_coremltools, quiet_tracing, replaced
from upcycle.program.joining import join_functions, weight_file
from upcycle.program.signature import (
    DECODE,
    HIDDEN,
    INPUT_IDS,
    NEXT_TOKEN,
    POSITION,
    Decoder,
    Signature,
)
from upcycle.program.specification import write_metadata

# An `MLModel` of one function in, the same with smaller weights out.
Compress = Callable[[Any], Any]

# How coremltools' native code begins to tell that it cannot write, always as RuntimeError.
_CANNOT_WRITE = ("[MIL FileWriter]", "filesystem error")
_NEARLY_FULL = 1 << 20  # bytes: what its last piece may leave free


def save_package(
    decoder: Decoder,
    package: Path,
    *,
    functions: Mapping[str, int],
    metadata: Mapping[str, str],
    compress: Compress | None = None,
    watch: Callable[[str], None] = lambda note: None,
) -> None:
    """Save a decoder as an iOS 18 package in fp16. Nothing is printed.

    Args:
        decoder: an `nn.Module` with a signature.
        package: the `.mlpackage` to write; the same inputs give the same bytes.
        functions: how many queries each function takes per call, by name; "main" is the default
            one. All share their weights.
        metadata: what to note in the package.
        compress: applied to each function, before they are joined: coremltools compresses no
            package of several functions. It must give equal weights equal bytes.
        watch: told of each step.

    Raises:
        ExportError: what the decoder computes depends on more than the shape of its inputs.
        BrokenExportError: the functions do not share their weights (our bug).
    """
    with scratch_folder(package.parent) as scratch:
        parts = {name: Path(scratch, f"{name}.mlpackage") for name in functions}
        if len(parts) == 1:
            parts[DECODE] = package
        for name, queries in functions.items():
            watch(f"converting {name}")
            with _temporary_files(scratch):
                _save_function(decoder, queries, parts[name], compress)
        if len(parts) > 1:
            watch("joining")
            alone = weights_size(parts[DECODE])
            join_functions(parts, package)
            check_sharing(alone, weights_size(package))
    write_metadata(package, metadata)
    _fix_identifiers(package / "Manifest.json")


def _save_function(
    decoder: Decoder, queries: int, package: Path, compress: Compress | None
) -> None:
    model = convert_decoder(decoder, queries)
    with quiet_coremltools():
        (compress(model) if compress else model).save(str(package))


@contextmanager
def _temporary_files(parent: Path) -> Iterator[None]:
    """Have temporary files, of which coremltools makes some the size of the weights, in a folder.

    So one file system needs room, and nothing stays in the system's folder for them.

    Raises:
        OSError: coremltools could not write one.
    """
    with scratch_folder(parent) as folder, replaced(tempfile, "tempdir", str(folder)):
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith(_CANNOT_WRITE):
                raise
            # It does not say why.
            is_full = shutil.disk_usage(folder).free < _NEARLY_FULL
            number = errno.ENOSPC if is_full else errno.EIO
            raise OSError(number, str(error)) from error


def convert_decoder(decoder: Decoder, queries: int) -> Any:
    """The `MLModel` of a decoder that takes `queries` tokens per call, with fp16 weights.

    Raises:
        ExportError: as for `trace_decoder`, or coremltools has no converter for an operation.
    """
    traced = trace_decoder(decoder, queries)
    signature = decoder.signature(queries)
    with quiet_coremltools(), lean_overflow_probe():
        import coremltools as ct
        import numpy as np

        inputs = [
            ct.TensorType(name, shape, dtype=getattr(np, dtype))
            for name, shape, dtype in signature.inputs
        ]
        outputs = [
            ct.TensorType(name, dtype=np.int32 if name == NEXT_TOKEN else np.float16)
            for name in signature.outputs
        ]
        states = [
            ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
            for name, shape in signature.states.items()
        ]
        try:
            return ct.convert(
                traced,
                inputs=inputs,
                outputs=outputs,
                states=states,
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=ct.precision.FLOAT16,
                skip_model_load=True,  # loading is for the Mac's runtime
            )
        except (NotImplementedError, ValueError) as error:
            raise ExportError(
                f"coremltools cannot convert the model: {' '.join(str(error).split())}",
                where=type(decoder).__name__,
                fix="export a model of plain attention and feed-forward layers",
            ) from error


def trace_decoder(decoder: Decoder, queries: int) -> Any:
    """The TorchScript of one call with `queries` tokens.

    Raises:
        ExportError: other tokens at another position make the trace and the decoder differ.
    """
    assert isinstance(decoder, nn.Module)
    inputs = decoder.example_inputs(queries)
    with quiet_tracing(), torch.no_grad(), _FloatingScatters():
        # torch's own check would compare two runs on the same inputs.
        traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
            decoder, inputs, check_trace=False
        )
        for first in range(1, 4):
            others = _other_inputs(inputs, decoder.signature(queries), first)
            pairs = zip(as_tuple(traced(*others)), as_tuple(decoder(*others)), strict=True)
            if not all(torch.allclose(*pair, rtol=1e-3, atol=1e-4) for pair in pairs):
                raise ExportError(
                    f"{type(decoder).__name__}: the model does other operations for other tokens",
                    where="torch.jit.trace",
                    fix="export a model whose operations depend on the shape of its input only",
                )
    return traced


class _FloatingScatters(TorchFunctionMode):
    """Scatter the number 1.0 instead of 1: coremltools 9.0 refuses an integer in floats."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.scatter_ and len(args) == 4 and isinstance(args[3], int):
            args = (*args[:3], float(args[3]))
        return func(*args, **(kwargs or {}))


def _other_inputs(
    inputs: tuple[Tensor, ...], signature: Signature, first: int
) -> tuple[Tensor, ...]:
    """The inputs with tokens `first`, `first` + 1, .., or other hidden states, at position 1."""
    values = dict(zip((name for name, *_ in signature.inputs), inputs, strict=True))
    values[POSITION] = torch.ones_like(values[POSITION])
    if INPUT_IDS in values:
        tokens = values[INPUT_IDS]
        values[INPUT_IDS] = torch.arange(first, first + tokens.shape[1], dtype=tokens.dtype)[None]
    else:
        hidden = values[HIDDEN]
        values[HIDDEN] = torch.arange(hidden.numel()).mul(first).sin().reshape(hidden.shape)
    return tuple(values.values())


def weights_size(package: Path) -> int:
    """Bytes of a package's weight file."""
    return weight_file(package).stat().st_size


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
