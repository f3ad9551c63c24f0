"""Export a checkpoint as a Core ML program that decodes one token per call."""

import json
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file, write_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, staged_entry
from upcycle.errors import ExportError
from upcycle.export.checks import check_graph
from upcycle.export.decoder import DecoderShape, StatefulDecoder, decoder_shape
from upcycle.export.graph import Function, read_graph
from upcycle.export.loading import CONTEXT_MULTIPLE, IMPLEMENTATIONS, load_for_export
from upcycle.export.norms import guard_norms
from upcycle.export.program import save_package, trace_decoder
from upcycle.export.rotary import tabulate_rotary
from upcycle.export.traffic import METADATA_KEY
from upcycle.progress import Progress, Watcher, ignore

HUB_NAME_KEY = "co.huggingface.exporters.name"  # where swift-transformers finds the tokenizer
_LIBRARIES = ("coremltools", "numpy", "torch", "transformers")
_STEPS = 4


@dataclass(frozen=True)
class ExportResult:
    """What was exported.

    Attributes:
        package: the `.mlpackage`.
        shape: the decoder's numbers.
        context: C, the positions that the KV cache holds.
        attention: "qfold" or "repeat-kv".
        function: the graph of the saved package.
        manifest: the document stored in the package's metadata.
    """

    package: Path
    shape: DecoderShape
    context: int
    attention: str
    function: Function
    manifest: dict[str, Any]


def export_coreml(
    checkpoint: str | Path,
    output: str | Path,
    *,
    context: int = 512,
    attention: str = "qfold",
    overwrite: bool = False,
    watch: Watcher = ignore,
) -> ExportResult:
    """Trace a checkpoint through transformers' own model and convert it to Core ML (iOS 18, fp16).

    The program takes `inputIds` [1, 1], `position` [1] (both int32) and `causalMask`
    [1, 1, 1, C] (fp16, added to the scores: 0 up to the position, -4e4 beyond) and gives `logits`
    [1, 1, vocabulary]. K and V live in the states `keyCache` and `valueCache` [L, g, C, d].

    Args:
        checkpoint: a folder, Hub cache snapshot or Hub id.
        output: the `.mlpackage` to make.
        context: C, a multiple of 32, at most the model's positions.
        attention: "qfold" never copies K and V; "repeat-kv" is the model's own attention, which
            copies them to all query heads, for comparison.
        overwrite: replace an existing package.
        watch: told of each step.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ExportError: the model or an option cannot be exported.
        OutputError: the output exists or cannot be written.
        BrokenExportError: the saved program is not the model's (our bug).
    """
    output = Path(output)
    opened = Checkpoint.open(checkpoint)
    _check_request(output, context, attention)
    check_output(output, overwrite=overwrite, inputs=[opened.folder])

    def step(done: int, note: str) -> None:
        watch(Progress("export", done, _STEPS, "steps", note))

    step(0, "loading")
    model = load_for_export(opened, attention, context)
    tabulate_rotary(model, context)
    guard_norms(model)
    shape = decoder_shape(model)
    decoder = StatefulDecoder(model, shape, context).eval()
    step(1, "tracing")
    traced = trace_decoder(decoder, context)
    step(2, "converting")
    manifest = _manifest(opened, shape, context, attention)
    # A Hub id's folder is a cache snapshot, whose name is a commit.
    name = opened.folder.resolve().name if Path(checkpoint).is_dir() else str(checkpoint)
    with staged_entry(output, overwrite=overwrite, inputs=[opened.folder]) as package:
        save_package(
            traced,
            package,
            states={name: tuple(buffer.shape) for name, buffer in decoder.named_states()},
            context=context,
            metadata={HUB_NAME_KEY: name, METADATA_KEY: json.dumps(manifest, sort_keys=True)},
        )
        step(3, "checking")
        function = read_graph(package).functions["main"]
        check_graph(function, shape, repeated=attention == "repeat-kv")
    step(_STEPS, "")
    return ExportResult(output, shape, context, attention, function, manifest)


def _check_request(output: Path, context: int, attention: str) -> None:
    if output.suffix != ".mlpackage":
        raise ExportError(
            f"{output.name} is no name for a Core ML package",
            where=str(output),
            fix="end it in .mlpackage",
        )
    if attention not in IMPLEMENTATIONS:
        raise ExportError(
            f"unknown attention {attention!r}",
            where="--attention",
            fix=f"choose {' or '.join(IMPLEMENTATIONS)}",
        )
    if context < CONTEXT_MULTIPLE or context % CONTEXT_MULTIPLE:
        raise ExportError(
            f"context {context} is no positive multiple of {CONTEXT_MULTIPLE}",
            where="--context",
            fix=f"pass {max(1, round(context / CONTEXT_MULTIPLE)) * CONTEXT_MULTIPLE}",
        )
    numpy = tuple(map(int, version("numpy").split(".")[:2]))
    if version("coremltools").startswith("9.0") and numpy >= (2, 4):
        raise ExportError(
            f"coremltools 9.0 cannot convert with numpy {version('numpy')}",
            where="installed packages",
            fix='pip install "numpy<2.4"',
        )


def _manifest(
    checkpoint: Checkpoint, shape: DecoderShape, context: int, attention: str
) -> dict[str, Any]:
    """The package's manifest. It goes into the metadata: a package has no place for more files."""
    names = ["config.json", *sorted({tensor.shard for tensor in checkpoint.tensors.values()})]
    with tempfile.TemporaryDirectory() as scratch:
        return write_manifest(
            Path(scratch),
            stage="export",
            source={name: hash_file(checkpoint.folder / name) for name in names},
            options={"context": context, "attention": attention},
            libraries=_LIBRARIES,
            result={"decoder": asdict(shape)},
        )
