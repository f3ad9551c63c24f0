"""The files beside the weights: copied byte for byte, the configuration edited in place."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import chunks_of, visible_files
from upcycle.checkpoint.foreign import WEIGHT_SUFFIXES
from upcycle.checkpoint.json_edit import remove_top_level, set_top_level
from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from upcycle.checkpoint.remote_code import unnamed_code
from upcycle.errors import CheckpointError

_NOT_COPIED = {CONFIG_FILE, INDEX_FILE, MANIFEST_NAME}


def copy_sidecars(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy every file that is neither weights, index, configuration, manifest nor unused code.

    Symlinks of a Hub cache are followed, hidden files and folders are left out, and the modes
    follow the umask.

    Returns:
        The relative paths of what was left behind: weights and indices in other formats, and the
        model's own code, which the output's configuration does not name.

    Raises:
        CheckpointError: a file cannot be read, or its name is not UTF-8.
    """
    converted = {header.path.name for header in checkpoint.headers}
    left_behind = []
    code = unnamed_code(checkpoint.config, checkpoint.folder)
    for name in visible_files(checkpoint.folder):
        if name in code:
            left_behind.append(name)
        elif Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(".bin.index.json"):
            if name not in converted:
                left_behind.append(name)
        elif name not in _NOT_COPIED:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(chunks_of(checkpoint.folder / name))
    return left_behind


def edit_config(
    text: str,
    edits: Mapping[str, Any],
    *,
    after: str,
    where: Path,
    removed: Collection[str] = (),
) -> str:
    """Set and remove top-level keys of `config.json` and leave every other byte as it is.

    Args:
        text: the file's text.
        edits: new values by key.
        after: the key behind which an absent key is inserted.
        where: the file, for error messages.
        removed: keys that go.

    Raises:
        CheckpointError: the text has an edited key twice.
    """
    edited = text
    for key, value in edits.items():
        edited = set_top_level(edited, key, value, after=after)
    for key in removed:
        edited = remove_top_level(edited, key)
    wanted = {**json.loads(text), **edits}
    if json.loads(edited) != {key: value for key, value in wanted.items() if key not in removed}:
        raise CheckpointError(
            f"cannot edit {', '.join([*edits, *removed])} in {CONFIG_FILE}",
            where=str(where),
            fix="write each key of config.json once",
        )
    return edited
