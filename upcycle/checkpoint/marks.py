"""What shows that a folder is an output of this package, which an overwrite may replace."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from upcycle.checkpoint.manifest import MANIFEST_NAME, ManifestPart, Texts

_NAME = "upcycle"
REPORT_NAME = "report.json"
_DOCUMENTS = (MANIFEST_NAME, REPORT_NAME)  # a report of `eval` has no manifest beside it
_SPECIFICATION = Path("Data", "com.apple.CoreML", "model.mlmodel")
# A Core ML package notes the manifest in its specification's metadata, a protobuf map: the key, the
# length of the value, the value. What follows that is not text.
_NOTED = re.compile(rb"\n\x07upcycle\x12[\x80-\xff]*[\x00-\x7f](\{.*)", re.DOTALL)
_MOST_BYTES = 1 << 26  # of a file that is read here


def made_here(path: Path) -> bool:
    """Whether a path is an empty folder, or one in which our manifest or report lies.

    The name of a file shows nothing: what stands in it must say that this package wrote it.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            return False
        return not any(path.iterdir()) or any(map(_is_signed, _texts(path)))
    except OSError:  # what cannot be read shows nothing either
        return False


def _texts(folder: Path) -> Iterator[str]:
    """Where a folder may say what made it."""
    for name in (*_DOCUMENTS, _SPECIFICATION):
        path = folder / name
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            continue
        content = path.read_bytes()
        if name == _SPECIFICATION:
            noted = _NOTED.search(content)
            content = noted[1] if noted else b""
        yield content.decode("utf-8", errors="replace")


class _Signed(ManifestPart):
    """What all documents of ours note: the versions of what made them."""

    versions: Texts


def _is_signed(text: str) -> bool:
    """Whether a text begins with a document of ours."""
    try:
        return _NAME in _Signed.model_validate(json.JSONDecoder().raw_decode(text)[0]).versions
    except (ValueError, RecursionError):
        return False
