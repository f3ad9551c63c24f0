"""Export a checkpoint as a Core AI asset, Apple's successor of Core ML packages."""

from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, check_room, staged_entry
from upcycle.errors import ExportError
from upcycle.export.checks import check_graph
from upcycle.export.coreai.programs import DTYPES, convert_program, require_coreai
from upcycle.export.coreml import ExportResult
from upcycle.export.loading import load_decoder
from upcycle.export.request import (
    HUB_NAME_KEY,
    check_target,
    export_manifest,
    functions_of,
    hub_name,
)
from upcycle.options.export import DEFAULTS, ExportOptions
from upcycle.program.coreai import read_program
from upcycle.program.noted import check_program
from upcycle.progress import Progress, Watcher, ignore

SUFFIX = ".aimodel"
_LIBRARIES = ("coreai-core", "coreai-torch", "numpy", "torch", "transformers")
_GRAPH_BYTES = 1 << 16  # of a layer in a function, more than twice what was measured


def export_coreai(
    checkpoint: str | Path,
    output: str | Path,
    options: ExportOptions = DEFAULTS,
    *,
    dtype: str = "float16",
    overwrite: bool = False,
    watch: Watcher = ignore,
) -> ExportResult:
    """Export a checkpoint's model through `torch.export` to a Core AI asset (iOS and macOS 27).

    Its functions have the names, inputs, outputs and states of `export_coreml`'s. Two exports
    differ in their bytes, because Apple's packages name constants at random.

    Args:
        checkpoint: a folder, Hub cache snapshot or Hub id.
        output: the `.aimodel` to make.
        options: what to make of it, in one piece; its weights are not quantised.
        dtype: "float16", or "float32" for a program that can be compared to the last digits.
        overwrite: replace an existing asset.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ExportError: the model or an option cannot be exported, or Apple's packages are missing.
        OutputError: the output exists or cannot be written.
        BrokenExportError: the saved program is not the model's (our bug).
    """
    output = Path(output)
    _check_request(output, options, dtype)
    require_coreai()
    opened = Checkpoint.open(checkpoint)
    check_output(output, overwrite=overwrite, inputs=[opened.folder])
    steps = count()

    def step(note: str) -> None:
        watch(Progress("export", next(steps), len(functions_of(options)) + 3, "steps", note))

    step("loading")
    decoder = load_decoder(opened, options)
    program = convert_program(decoder, functions_of(options), dtype, step)
    with staged_entry(output, overwrite=overwrite, inputs=[opened.folder]) as asset:
        # Where a disk is full, Apple's writer ends the process.
        graphs_size = _GRAPH_BYTES * decoder.shape.num_layers * len(functions_of(options))
        check_room(asset.parent, _weights_size(decoder) + graphs_size)
        _save(program, asset, hub_name(checkpoint, opened))
        target = {"target": "coreai", "dtype": dtype}
        manifest = export_manifest(
            opened, decoder.shape, options, libraries=_LIBRARIES, target=target
        ).write(asset)
        step("checking")
        graph = read_program(asset)
        check_program(graph, manifest, str(output))
        for function in graph.functions.values():
            check_graph(function, decoder.shape, options)
    step("")
    return ExportResult(output, options, graph, manifest)


def _check_request(output: Path, options: ExportOptions, dtype: str) -> None:
    for name in ("quantize", "untie", "chunk_size"):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ExportError(
                f"Core AI assets have no {option}",
                where=option,
                fix="omit it, or export for Core ML",
            )
    check_target(output, SUFFIX, options)
    if dtype not in DTYPES:
        raise ExportError(
            f"unknown dtype {dtype!r}", where="--dtype", fix=f"choose {' or '.join(DTYPES)}"
        )


def _weights_size(decoder: nn.Module) -> int:
    """Bytes of the parameters as they are stored, shared ones once."""
    return sum({weight.data_ptr(): weight.nbytes for weight in decoder.parameters()}.values())


def _save(program: Any, asset: Path, name: str) -> None:
    from coreai.runtime import AIModelAssetMetadata

    metadata = AIModelAssetMetadata()
    metadata.set_custom(HUB_NAME_KEY, name)
    program.save_asset(asset, metadata=metadata)
