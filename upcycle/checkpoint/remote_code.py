"""Code of its own that a checkpoint names in `auto_map`, which is never run here."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upcycle.checkpoint.reader import CONFIG_FILE
from upcycle.errors import CheckpointError, FamilyError, warn

AUTO_MAP = "auto_map"
_MODEL = ("AutoModel", "AutoConfig")
_IMPORT = re.compile(r"^[ \t]*from[ \t]+\.(\w+)[ \t]+import", re.MULTILINE)


def model_code(config: Mapping[str, Any]) -> list[str]:
    """The classes that a configuration names for the model, as they stand there."""
    return [entry for key, entry in _entries(config).items() if key.startswith(_MODEL) and entry]


def without_model_code(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What is left of `auto_map` without the model's code: tokenizers keep theirs, or None."""
    named = _entries(config).items()
    return {key: entry for key, entry in named if entry and not key.startswith(_MODEL)} or None


@contextmanager
def own_class(config: Mapping[str, Any], folder: Path) -> Iterator[None]:
    """Where a model has code of its own, take it only if transformers' class fits its tensors.

    What does not fit raises `CheckpointError` inside; where there is code it is then the code that
    says what the weights mean.

    Args:
        config: the configuration as it lies on disk.
        folder: where it lies.

    Raises:
        FamilyError: the tensors do not fit, and there is code for the model.
    """
    code = model_code(config)
    try:
        yield
    except CheckpointError as error:
        if not code:
            raise
        raise remote_code_refusal(config, folder, error.what) from error
    tell_of_code(config)


def tell_of_code(config: Mapping[str, Any]) -> None:
    """Warn where a configuration names code for a model that loads without it."""
    notice = code_notice(config)
    if notice:
        warn(notice)


def code_notice(config: Mapping[str, Any]) -> str | None:
    """What to tell of a configuration that names code for a model that loads without it."""
    code = model_code(config)
    if not code:
        return None
    return (
        f"{AUTO_MAP} in {CONFIG_FILE} names code for the model ({code[0]}), which is never run: "
        f"transformers' own {config.get('model_type')} is taken"
    )


def remote_code_refusal(config: Mapping[str, Any], folder: Path, misfit: str) -> FamilyError:
    """The error for a model whose own code alone knows what its tensors mean.

    Args:
        config: the configuration as it lies on disk.
        folder: where it lies.
        misfit: what shows that transformers' class of this type is another one.
    """
    return FamilyError(
        f"{AUTO_MAP} names remote code for the model ({model_code(config)[0]}), which is never run "
        f"here, and transformers' own {config.get('model_type')} does not fit: {misfit}",
        where=f"{folder / CONFIG_FILE}, {AUTO_MAP}",
        fix="save the model with a class of transformers, as its authors' script may do, and "
        "convert that",
    )


def unnamed_code(config: Mapping[str, Any], folder: Path) -> set[str]:
    """Python files beside the weights that nothing names any more without the model's code.

    Where a tokenizer or processor has code too, all files stay, since they may import each other.
    """
    if not model_code(config) or without_model_code(config) is not None:
        return set()
    if any(_names_code(path) for path in sorted(folder.glob("*.json")) if path.name != CONFIG_FILE):
        return set()
    left = [entry.split(".")[0] for entry in model_code(config) if "--" not in entry]
    found: set[str] = set()
    while left:
        path = folder / f"{left.pop()}.py"
        if path.name not in found and path.is_file():
            found.add(path.name)
            left += _IMPORT.findall(path.read_text(encoding="utf-8", errors="replace"))
    return found


def _names_code(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(document, dict) and bool(document.get(AUTO_MAP))


def _entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Each auto class with what stands for it: a text, or for tokenizers a pair of them."""
    named = config.get(AUTO_MAP)
    if not isinstance(named, Mapping):
        named = {"AutoModel": named}
    return {
        key: entry if not key.startswith(_MODEL) or isinstance(entry, str | None) else str(entry)
        for key, entry in named.items()
    }
