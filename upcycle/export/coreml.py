"""Export a checkpoint as a Core ML program that decodes one token per call, or prefills several."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file, write_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output
from upcycle.errors import ExportError
from upcycle.export.attention import QFOLD, REPEAT_KV
from upcycle.export.bundle import bundle_folder, staged_bundle, write_bundle
from upcycle.export.checks import check_graph
from upcycle.export.decoder import DecoderShape
from upcycle.export.graph import Function, read_graph
from upcycle.export.loading import STATE, load_decoder
from upcycle.export.options import ExportOptions, check_options
from upcycle.export.program import save_package
from upcycle.export.quantize.preparation import Prepared, prepare_quantization
from upcycle.export.signature import DECODE, PREFILL
from upcycle.export.traffic import METADATA_KEY
from upcycle.progress import Progress, Watcher, ignore
from upcycle.recipe.schema import BUILTIN

HUB_NAME_KEY = "co.huggingface.exporters.name"  # where swift-transformers finds the tokenizer
_LIBRARIES = ("coremltools", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class ExportResult:
    """What was exported.

    Attributes:
        package: the `.mlpackage`.
        shape: the decoder's numbers.
        options: what was asked for.
        functions: the graphs of the saved package by name.
        manifest: the document stored in the package's metadata.
        quantization: how the weights are stored, None for fp16.
    """

    package: Path
    shape: DecoderShape
    options: ExportOptions
    functions: Mapping[str, Function]
    manifest: dict[str, Any]
    quantization: Prepared | None = None

    @property
    def function(self) -> Function:
        """The graph that decodes one token."""
        return self.functions[DECODE]


def export_coreml(
    checkpoint: str | Path,
    output: str | Path,
    *,
    context: int = 512,
    prefill: int | None = None,
    attention: str = QFOLD,
    kv_cache: str = STATE,
    conv: bool = False,
    split_head: int = 1,
    argmax: bool = False,
    quantize: str | None = None,
    untie: bool = False,
    calibration: Sequence[str | Path] = (BUILTIN,),
    overwrite: bool = False,
    watch: Watcher = ignore,
) -> ExportResult:
    """Trace a checkpoint through transformers' own model and convert it to Core ML (iOS 18, fp16).

    The function `main` takes `inputIds` [1, 1], `position` [1] (both int32) and `causalMask`
    [1, 1, 1, C] (fp16, added to the scores: 0 up to the position, -4e4 beyond) and gives `logits`
    [1, 1, vocabulary]. K and V live in the states `keyCache` and `valueCache` [L, g, C, d]. A model
    with sliding windows shorter than C takes a mask `slidingMask` beside or instead; the
    manifest's `masks` say how many tokens each mask shows. The function `prefill` takes T tokens
    and masks [1, 1, T, C] from `position` on, which must leave room for them all. With a read-only
    cache there are inputs `keyCache0`, `valueCache0`, .. [1, g, C, d] instead of the states, and
    outputs `newKey0`, `newValue0`, .. [1, g, T, d]; the masks then hide the new positions too.
    Tokenizer and settings go into a folder beside the package, see `bundle_folder`.

    Args:
        checkpoint: a folder, Hub cache snapshot or Hub id.
        output: the `.mlpackage` to make.
        context: as in `ExportOptions`, like the next eight.
        prefill: see there.
        attention: see there.
        kv_cache: see there.
        conv: see there.
        split_head: see there.
        argmax: see there.
        quantize: see there.
        untie: see there.
        calibration: text on which the sensitivity of layers is measured, where `quantize` asks.
        overwrite: replace an existing package.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        DataError: the calibration text cannot be read.
        ExportError: the model or an option cannot be exported.
        OutputError: the output or its folder exists or cannot be written.
        BrokenExportError: the saved program is not the model's (our bug).
    """
    output = Path(output)
    options = ExportOptions(
        context, prefill, attention, kv_cache, conv, split_head, argmax, quantize, untie
    )
    opened = Checkpoint.open(checkpoint)
    _check_request(output, options)
    for path in (output, bundle_folder(output)):
        check_output(path, overwrite=overwrite, inputs=[opened.folder])
    functions = {DECODE: 1} | ({} if prefill is None else {PREFILL: prefill})
    steps = count()
    last = len(functions) + 2 + (len(functions) > 1)

    def step(note: str) -> None:
        watch(Progress("export", next(steps), last, "steps", note))

    prepared = None
    if quantize is not None:
        prepared = prepare_quantization(
            opened, quantize, calibration=calibration, untied=untie, watch=watch
        )
    step("loading")
    decoder, shape = load_decoder(
        opened,
        context=context,
        attention=attention,
        kv_cache=kv_cache,
        conv=conv,
        split_head=split_head,
        argmax=argmax,
    )
    manifest = _manifest(opened, shape, options, prepared)
    # A Hub id's folder is a cache snapshot, whose name is a commit.
    name = opened.folder.resolve().name if Path(checkpoint).is_dir() else str(checkpoint)
    with staged_bundle(output, overwrite=overwrite, inputs=[opened.folder]) as (package, folder):
        save_package(
            decoder,
            package,
            functions=functions,
            metadata={HUB_NAME_KEY: name, METADATA_KEY: json.dumps(manifest, sort_keys=True)},
            compress=prepared.compress if prepared else None,
            watch=step,
        )
        step("checking")
        graphs = read_graph(package).functions
        for graph in graphs.values():
            check_graph(graph, shape, repeated=attention == REPEAT_KV, states=kv_cache == STATE)
        write_bundle(opened, folder, package=package, manifest=manifest)
    step("")
    return ExportResult(output, shape, options, graphs, manifest, prepared)


def _check_request(output: Path, options: ExportOptions) -> None:
    if output.suffix != ".mlpackage":
        raise ExportError(
            f"{output.name} is no name for a Core ML package",
            where=str(output),
            fix="end it in .mlpackage",
        )
    check_options(options)
    numpy = tuple(map(int, version("numpy").split(".")[:2]))
    if version("coremltools").startswith("9.0") and numpy >= (2, 4):
        raise ExportError(
            f"coremltools 9.0 cannot convert with numpy {version('numpy')}",
            where="installed packages",
            fix='pip install "numpy<2.4"',
        )


def _manifest(
    checkpoint: Checkpoint,
    shape: DecoderShape,
    options: ExportOptions,
    prepared: Prepared | None,
) -> dict[str, Any]:
    """The package's manifest. It goes into the metadata: a package has no place for more files."""
    names = ["config.json", *sorted({tensor.shard for tensor in checkpoint.tensors.values()})]
    with tempfile.TemporaryDirectory() as scratch:
        return write_manifest(
            Path(scratch),
            stage="export",
            source={name: hash_file(checkpoint.folder / name) for name in names},
            options={**asdict(options), "quantize": _name(options.quantize)},
            libraries=_LIBRARIES,
            result={
                "decoder": asdict(shape),
                "quantization": prepared.record() if prepared else None,
            },
        )


def _name(quantize: str | None) -> str | None:
    """A preset, or a file's name without its folder."""
    return None if quantize is None else Path(quantize).name
