"""The files beside the weights: copied byte for byte, the configuration edited in place."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import chunks_of, visible_files
from upcycle.checkpoint.foreign import WEIGHT_SUFFIXES
from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from upcycle.checkpoint.remote_code import unnamed_code
from upcycle.errors import CheckpointError

_NOT_COPIED = {CONFIG_FILE, INDEX_FILE, MANIFEST_NAME}
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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
        is_weights = Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(".bin.index.json")
        if name in code or (is_weights and name not in converted):
            left_behind.append(name)
        elif not is_weights and name not in _NOT_COPIED:
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


def set_top_level(text: str, key: str, value: object, *, after: str) -> str:
    """Replace the value of a top-level key, or insert the key behind another one.

    Args:
        text: a JSON object with at least one key.
        key: the key to set.
        value: its new value.
        after: the top-level key behind which an absent `key` goes, in that key's own layout; the
            last key where that one is absent too.
    """
    members = _members(text)
    new = json.dumps(value)
    if key in members:
        _, begin, end = members[key]
        return text[:begin] + new + text[end:]
    key_begin, _, end = members.get(after) or members[next(reversed(members))]
    lead = text[len(text[:key_begin].rstrip()) : key_begin]
    return f"{text[:end]},{lead}{json.dumps(key)}: {new}{text[end:]}"


def remove_top_level(text: str, key: str) -> str:
    """Remove a top-level key and its value, with the comma that parted it from its neighbour.

    Args:
        text: a JSON object.
        key: the key; where the object lacks it nothing changes.
    """
    members = _members(text)
    if key not in members:
        return text
    names = list(members)
    index = names.index(key)
    begin, _, end = members[key]
    if index:
        begin = members[names[index - 1]][2]
    elif len(names) > 1:
        end = members[names[1]][0]
    return text[:begin] + text[end:]


def _members(text: str) -> dict[str, tuple[int, int, int]]:
    """Of each top-level key: where it begins, and where its value begins and ends."""
    members = {}
    position = _skip(text, text.index("{") + 1)
    while text[position] != "}":
        key_begin = position
        key, position = _DECODER.raw_decode(text, position)
        value_begin = _skip(text, _skip(text, position) + 1)
        _, value_end = _DECODER.raw_decode(text, value_begin)
        members[key] = (key_begin, value_begin, value_end)
        position = _skip(text, value_end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return members


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
