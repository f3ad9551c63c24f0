"""Folders under names that libraries in Rust and C++ can take."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from upcycle.utf8 import shown


@contextmanager
def under_utf8_name(folder: Path) -> Iterator[Path]:
    """The folder itself, or where its path has bytes that are no UTF-8, a link to it.

    File systems take such names and so does Python (PEP 383); safetensors, tokenizers and
    coremltools do not.
    """
    if shown(str(folder)) == str(folder):
        yield folder
        return
    with TemporaryDirectory() as place:
        link = Path(place, "folder")
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link
