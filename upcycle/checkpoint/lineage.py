"""What a folder was made from, as its manifest tells it, and whether something else is that."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from upcycle.checkpoint.manifest import Manifest
from upcycle.checkpoint.reader import CONFIG_FILE
from upcycle.utf8 import strict

CONVERT, TRAIN = "convert", "train"  # stages, as manifests name them
# How text becomes ids. Settings and templates beside it may change without changing the model.
_VOCABULARY = {
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "added_tokens.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
}  # fmt: skip


def is_of_model(name: str) -> bool:
    """Whether a checkpoint's file decides what the model computes from text.

    Args:
        name: its path relative to the folder; what lies deeper is another model's.
    """
    is_weights = PurePosixPath(name).suffix == ".safetensors" and "/" not in name
    return is_weights or name == CONFIG_FILE or is_vocabulary(name)


def is_vocabulary(name: str) -> bool:
    """Whether a checkpoint's file says which text each id stands for."""
    return name in _VOCABULARY


def origin_of(manifest: Manifest | None) -> dict[str, str]:
    """Hashes of the model that a converted or uptrained folder goes back to, by file name.

    Returns:
        Those that `is_of_model`; none where the manifest does not know.
    """
    if manifest is None or manifest.stage not in (CONVERT, TRAIN):
        return {}
    source = manifest.source
    files = source.files if manifest.stage == CONVERT else source.origin
    return {name: known for name, known in files.items() if is_of_model(name)}


def other_files(known: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names of `known` whose files are not there, or are there with another content."""
    return [name for name in sorted(known) if found.get(name) != known[name]]


def not_of_origin(origin: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """A model's files that are not those that another one was made from.

    Args:
        origin: as `origin_of` tells.
        found: hashes of the model's files; those that do not decide what it computes are ignored.
    """
    knows_vocabulary = any(map(is_vocabulary, origin))
    return [
        name
        for name in sorted(found)
        if is_of_model(name)
        and (knows_vocabulary or not is_vocabulary(name))
        and found[name] != origin.get(name)
    ]


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed from a stored mapping to another, in words; files by their names."""
    changed = []
    was, now = strict(was), strict(now)  # names that UTF-8 cannot hold are stored in other words
    for key in sorted({*was, *now}):
        before, after = was.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            parts = [
                name for name in sorted({*before, *after}) if before.get(name) != after.get(name)
            ]
            changed.append(f"{key}: {', '.join(parts)} changed")
        elif _is_of_hashes(before) or _is_of_hashes(after):
            changed.append(f"{key} changed")
        else:
            changed.append(f"{key} was {before!r} and is {after!r}")
    return changed


def _is_of_hashes(value: Any) -> bool:
    """Whether a value says nothing to people."""
    return "xxh3-128:" in str(value)
