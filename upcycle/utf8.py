"""Text that UTF-8 can hold, and JSON that every parser takes.

Python's strings may have lone surrogates: halves of characters in escaped JSON, and bytes of file
names that are no UTF-8 (PEP 383). Neither can be written to a file.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

_NAME_BYTES = range(0xDC80, 0xDD00)  # what PEP 383 makes of the bytes 0x80 to 0xff


def repaired(value: Any) -> Any:
    """Text for a model: U+FFFD for each lone surrogate, in lists and mappings too.

    What needs no repair comes back as the same object.
    """
    if isinstance(value, str):
        if _fits(value):
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {repaired(key): repaired(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(repaired(item) for item in value)
    return value


def shown(text: str) -> str:
    r"""Text for people: bytes of file names as `\xff`, other lone surrogates as `\ud800`."""
    if _fits(text):
        return text
    return "".join(
        f"\\x{ord(c) - 0xDC00:02x}" if ord(c) in _NAME_BYTES
        else c.encode("utf-8", "backslashreplace").decode()
        for c in text
    )  # fmt: skip


def strict(value: Any) -> Any:
    """The same data as `shown` text, lists, dictionaries, and null for numbers not finite."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping):
        return {shown(k) if isinstance(k, str) else k: strict(item) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON as RFC 8259 has it, of `strict` data; UTF-8 can hold it."""
    return json.dumps(
        strict(value), indent=indent, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False
    )


def _fits(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
