"""The files beside the weights: copied byte for byte, the configuration edited in place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import chunks_of, visible_files
from upcycle.checkpoint.foreign import WEIGHT_SUFFIXES
from upcycle.checkpoint.json_edit import set_top_level
from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from upcycle.errors import CheckpointError

_NOT_COPIED = {CONFIG_FILE, INDEX_FILE, MANIFEST_NAME}


def copy_sidecars(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy every file that is neither weights, index, configuration nor manifest.

    Symlinks of a Hub cache are followed, hidden files and folders are left out, and the modes
    follow the umask.

    Returns:
        The relative paths of the weights and indices in other formats that were left behind.

    Raises:
        CheckpointError: a file cannot be read, or its name is not UTF-8.
    """
    converted = {header.path.name for header in checkpoint.headers}
    left_behind = []
    for name in visible_files(checkpoint.folder):
        if Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(".bin.index.json"):
            if name not in converted:
                left_behind.append(name)
        elif name not in _NOT_COPIED:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(chunks_of(checkpoint.folder / name))
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
