"""What an export notes in its product: of which checkpoint and how it was made."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import Manifest, hash_file, write_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.decoder import DecoderShape
from upcycle.options.export import ExportOptions
from upcycle.program.noted import STAGE

# Where swift-transformers looks for the Hub id of the tokenizer; a folder's name is none.
HUB_NAME_KEY = "co.huggingface.exporters.name"


def hub_name(checkpoint: str | Path, opened: Checkpoint) -> str:
    """What to note under `HUB_NAME_KEY`: a Hub id, or the name of a folder."""
    # A Hub id's folder is a cache snapshot, whose name is a commit.
    return opened.folder.resolve().name if Path(checkpoint).is_dir() else str(checkpoint)


def write_export_manifest(
    folder: Path,
    checkpoint: Checkpoint,
    shape: DecoderShape,
    options: ExportOptions,
    *,
    libraries: Iterable[str],
    target: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the manifest of an export and return it, see `write_manifest`.

    Args:
        folder: where `upcycle.json` goes.
        checkpoint: what was exported.
        shape: the decoder's numbers.
        options: what was asked for.
        libraries: packages whose versions matter for the bytes.
        target: options that this target alone has.
        quantization: how the weights are stored, None for as they are computed with.
    """
    names = ["config.json", *sorted({tensor.shard for tensor in checkpoint.tensors.values()})]
    return write_manifest(
        folder,
        stage=STAGE,
        source={name: hash_file(checkpoint.folder / name) for name in names},
        options={**options.noted(), **(target or {})},
        libraries=libraries,
        result={"decoder": asdict(shape), "quantization": quantization},
    )
