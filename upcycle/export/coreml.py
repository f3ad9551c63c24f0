"""Export a checkpoint as a Core ML program that decodes one token per call, or prefills several."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, staged
from upcycle.errors import ExportError
from upcycle.export.bundle import staged_bundle, write_bundle
from upcycle.export.chunks.packages import PlannedPackage, chunk_packages
from upcycle.export.loading import load_decoder
from upcycle.export.quantize.preparation import Prepared, prepare_quantization
from upcycle.export.request import check_target, export_manifest, functions_of, hub_name
from upcycle.options.export import DEFAULTS, ExportOptions
from upcycle.program.chunked import bundle_folder, read_exported
from upcycle.program.graph import Function, Graph
from upcycle.program.noted import DecoderShape, ExportManifest
from upcycle.program.reading import read_graph
from upcycle.progress import Progress, Watcher, ignore

SUFFIX = ".mlpackage"
_LIBRARIES = ("coremltools", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class ExportResult:
    """What was exported.

    Attributes:
        package: the `.mlpackage`, the folder of chunks, or the `.aimodel`.
        options: what was asked for.
        graph: what was saved, chunks joined.
        manifest: what is noted in the package's metadata, or in the folder.
        quantization: how the weights are stored, None for fp16.
    """

    package: Path
    options: ExportOptions
    graph: Graph
    manifest: ExportManifest
    quantization: Prepared | None = None

    @property
    def functions(self) -> Mapping[str, Function]:
        """The saved functions by name."""
        return self.graph.functions

    @property
    def function(self) -> Function:
        """The function that decodes one token."""
        return self.graph.decode

    @property
    def shape(self) -> DecoderShape:
        """The decoder's numbers."""
        return self.manifest.result.decoder


def export_coreml(
    checkpoint: str | Path,
    output: str | Path,
    options: ExportOptions = DEFAULTS,
    *,
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

    With a chunk size the output is a folder with the tokenizer, the settings, and the packages
    `chunk1.mlpackage`, `chunk2.mlpackage`, .. for consecutive layers. All but the first take
    `hidden` [1, T, D] instead of `inputIds`, and all but the last give `newHidden`, which the next
    one takes, instead of `logits`. Each has the states of its own layers, or inputs and outputs
    with the numbers that its layers have in the model, and takes the masks that its layers need.

    Args:
        checkpoint: a folder, Hub cache snapshot or Hub id.
        output: the `.mlpackage` or the folder to make.
        options: what to make of it.
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
    check_target(output, SUFFIX, options)
    _check_libraries()
    opened = Checkpoint.open(checkpoint)
    chunked = options.chunk_size is not None
    for path in [output] if chunked else [output, bundle_folder(output)]:
        check_output(path, overwrite=overwrite, inputs=[opened.folder])
    prepared = prepare_quantization(opened, options, watch) if options.quantize else None
    watch(Progress("export", 0, 1, "steps", "loading"))
    decoder = load_decoder(opened, options)
    manifest = export_manifest(
        opened,
        decoder.shape,
        options,
        libraries=_LIBRARIES,
        quantization=prepared.record() if prepared else None,
    )
    if chunked:
        parts = chunk_packages(decoder, manifest, options, prepared)
    else:
        parts = [PlannedPackage(output.name, decoder, manifest, prepared)]
    steps = count(1)
    last = 1 + len(parts) * (1 + len(functions_of(options)) + (len(functions_of(options)) > 1))

    def step(note: str) -> None:
        watch(Progress("export", next(steps), last, "steps", note))

    name, inputs = hub_name(checkpoint, opened), [opened.folder]
    if chunked:
        with staged(output, overwrite=overwrite, inputs=inputs) as folder:
            saved = [part.save(folder, options, hub_name=name, watch=step) for part in parts]
            result = manifest.result.updated(chunks=[each.document for each in saved if each])
            manifest = manifest.updated(result=result.document)
            write_bundle(opened, folder, package=None, manifest=manifest)
            graph = read_exported(folder)
    else:
        with staged_bundle(output, overwrite=overwrite, inputs=inputs) as (package, folder):
            parts[0].save(package.parent, options, hub_name=name, watch=step)
            write_bundle(opened, folder, package=package, manifest=manifest)
            graph = read_graph(package)
    step("")
    return ExportResult(output, options, graph, manifest, prepared)


def _check_libraries() -> None:
    numpy = tuple(map(int, version("numpy").split(".")[:2]))
    if version("coremltools").startswith("9.0") and numpy >= (2, 4):
        raise ExportError(
            f"coremltools 9.0 cannot convert with numpy {version('numpy')}",
            where="installed packages",
            fix='pip install "numpy<2.4"',
        )
