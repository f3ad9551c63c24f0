"""The files beside the weights: copied byte for byte, the configuration edited in place."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.json_edit import set_top_level
from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from upcycle.errors import CheckpointError

# Weights in any format: those that were converted are written anew, and others would be stale.
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".tflite", ".npz",
}  # fmt: skip
_NOT_COPIED = {CONFIG_FILE, INDEX_FILE, MANIFEST_NAME}


def copy_sidecars(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy every file that is neither weights, index, configuration nor manifest.

    Symlinks of a Hub cache are followed, hidden files and folders are left out, and the modes
    follow the umask.

    Returns:
        The relative paths of the weights and indices in other formats that were left behind.
    """
    left_behind = []
    for path in sorted(checkpoint.folder.rglob("*")):
        relative = path.relative_to(checkpoint.folder)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".bin.index.json"):
            if str(relative) not in {header.path.name for header in checkpoint.headers}:
                left_behind.append(relative.as_posix())
        elif relative.as_posix() not in _NOT_COPIED:
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return left_behind


def edit_config(text: str, edits: Mapping[str, Any], *, after: str, where: Path) -> str:
    """Set top-level keys of `config.json` and leave every other byte as it is.

    Args:
        text: the file's text.
        edits: new values by key; each value is a scalar.
        after: the key behind which an absent key is inserted.
        where: the file, for error messages.

    Raises:
        CheckpointError: the text has an edited key twice.
    """
    edited = text
    for key, value in edits.items():
        edited = set_top_level(edited, key, value, after=after)
    if json.loads(edited) != {**json.loads(text), **edits}:
        raise CheckpointError(
            f"cannot edit {', '.join(edits)} in {CONFIG_FILE}",
            where=str(where),
            fix="write each key of config.json once",
        )
    return edited
