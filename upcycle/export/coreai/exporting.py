"""Export a checkpoint as a Core AI asset, Apple's successor of Core ML packages."""

from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file, write_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import check_output, staged_entry
from upcycle.errors import ExportError
from upcycle.export.attention import QFOLD, REPEAT_KV
from upcycle.export.checks import check_graph
from upcycle.export.coreai.programs import DTYPES, SlicedDecoder, convert_program, require_coreai
from upcycle.export.coreai.reading import Asset
from upcycle.export.coreml import HUB_NAME_KEY, ExportResult
from upcycle.export.decoder import DecoderShape
from upcycle.export.loading import STATE, load_decoder
from upcycle.export.options import ExportOptions, check_options
from upcycle.export.signature import DECODE, PREFILL
from upcycle.progress import Progress, Watcher, ignore

SUFFIX = ".aimodel"
_LIBRARIES = ("coreai-core", "coreai-torch", "numpy", "torch", "transformers")


def export_coreai(
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
        context: as in `ExportOptions`, like the next six.
        prefill: see there.
        attention: see there.
        kv_cache: see there.
        conv: see there.
        split_head: see there.
        argmax: see there.
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
    options = ExportOptions(context, prefill, attention, kv_cache, conv, split_head, argmax)
    _check_request(output, options, dtype)
    require_coreai()
    opened = Checkpoint.open(checkpoint)
    check_output(output, overwrite=overwrite, inputs=[opened.folder])
    functions = {DECODE: 1} | ({} if prefill is None else {PREFILL: prefill})
    steps = count()

    def step(note: str) -> None:
        watch(Progress("export", next(steps), len(functions) + 3, "steps", note))

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
    if kv_cache == STATE:
        decoder = SlicedDecoder(decoder.model, shape, context, argmax=argmax).eval()
    program = convert_program(decoder, functions, dtype, step)
    # A Hub id's folder is a cache snapshot, whose name is a commit.
    name = opened.folder.resolve().name if Path(checkpoint).is_dir() else str(checkpoint)
    with staged_entry(output, overwrite=overwrite, inputs=[opened.folder]) as asset:
        _save(program, asset, name)
        manifest = _write_manifest(asset, opened, shape, options, dtype)
        step("checking")
        graphs = Asset.read(asset).graph.functions
        for graph in graphs.values():
            check_graph(graph, shape, repeated=attention == REPEAT_KV, states=kv_cache == STATE)
    step("")
    return ExportResult(output, shape, options, graphs, manifest)


def _check_request(output: Path, options: ExportOptions, dtype: str) -> None:
    if output.suffix != SUFFIX:
        raise ExportError(
            f"{output.name} is no name for a Core AI asset",
            where=str(output),
            fix=f"end it in {SUFFIX}",
        )
    check_options(options)
    if dtype not in DTYPES:
        raise ExportError(
            f"unknown dtype {dtype!r}", where="--dtype", fix=f"choose {' or '.join(DTYPES)}"
        )


def _save(program: Any, asset: Path, name: str) -> None:
    from coreai.runtime import AIModelAssetMetadata

    metadata = AIModelAssetMetadata()
    metadata.set_custom(HUB_NAME_KEY, name)
    program.save_asset(asset, metadata=metadata)


def _write_manifest(
    asset: Path, checkpoint: Checkpoint, shape: DecoderShape, options: ExportOptions, dtype: str
) -> dict[str, Any]:
    names = ["config.json", *sorted({tensor.shard for tensor in checkpoint.tensors.values()})]
    return write_manifest(
        asset,
        stage="export",
        source={name: hash_file(checkpoint.folder / name) for name in names},
        options=asdict(options) | {"target": "coreai", "dtype": dtype},
        libraries=_LIBRARIES,
        result={"decoder": asdict(shape)},
    )
