"""Requests of an export, whatever the target: which are refused, and how they are noted."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.errors import ExportError
from upcycle.options.export import ExportOptions
from upcycle.program.noted import STAGE, DecoderShape, ExportManifest
from upcycle.program.signature import DECODE, PREFILL

# Where swift-transformers looks for the Hub id of the tokenizer; a folder's name is not one.
HUB_NAME_KEY = "co.huggingface.exporters.name"


def functions_of(options: ExportOptions) -> Mapping[str, int]:
    """How many tokens each function takes per call, by its name."""
    return {DECODE: 1} | ({} if options.prefill is None else {PREFILL: options.prefill})


def check_target(output: Path, suffix: str, options: ExportOptions) -> None:
    """Refuse what no target can do.

    Args:
        output: what to make.
        suffix: of the names of what the target makes; chunks go into a folder.
        options: what is asked of it.

    Raises:
        ExportError: the output has another suffix, or options contradict each other.
    """
    # What begins with a dot is hidden, or no name of its own.
    stem = "model" if output.name.startswith(".") or not output.name else output.stem
    if options.chunk_size is not None and output.suffix == suffix:
        raise ExportError(
            f"chunks go into a folder, and {output.name} is named like one {suffix}",
            where=str(output),
            fix=f"name it {stem}, or omit --chunk-size",
        )
    if options.chunk_size is None and output.suffix != suffix:
        nameless = output.name in ("", "..", suffix)
        raise ExportError(
            f"{output} names no package" if nameless else f"{output.name} does not end in {suffix}",
            where=str(output),
            fix=f"name it {stem}{suffix}",
        )
    if options.untie and options.quantize is None:
        raise ExportError(
            "there is nothing to untie in fp16",
            where="--untie",
            fix="pass --quantize too, or omit --untie",
        )


def hub_name(checkpoint: str | Path, opened: Checkpoint) -> str:
    """What to note under `HUB_NAME_KEY`: a Hub id, or the name of a folder."""
    # A Hub id's folder is a cache snapshot, whose name is a commit.
    return opened.folder.resolve().name if Path(checkpoint).is_dir() else str(checkpoint)


def export_manifest(
    checkpoint: Checkpoint,
    shape: DecoderShape,
    options: ExportOptions,
    *,
    libraries: Iterable[str],
    target: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> ExportManifest:
    """What an export notes in its product: of which checkpoint and how it was made.

    Args:
        checkpoint: what was exported.
        shape: the decoder's numbers.
        options: what was asked for.
        libraries: packages whose versions matter for the bytes.
        target: options that this target alone has.
        quantization: how the weights are stored, None for as they are computed with.
    """
    names = [CONFIG_FILE, *sorted({tensor.shard for tensor in checkpoint.tensors.values()})]
    return ExportManifest.of(
        stage=STAGE,
        source={name: hash_file(checkpoint.folder / name) for name in names},
        options={**options.noted(), **(target or {})},
        libraries=libraries,
        result={"decoder": shape.document, "quantization": quantization},
    )
