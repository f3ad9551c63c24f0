"""README.md, CONTRIBUTING.md and docs/ taken apart, for the tests of what they say."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        path: of the file.
        blocks: code that stands apart, each with its language, which may be empty.
        spans: code within the prose.
        links: where links and pictures point.
        headings: its headings.
    """

    path: Path
    blocks: list[tuple[str, str]]
    spans: list[str]
    links: list[str]
    headings: list[str]

    @property
    def code(self) -> list[str]:
        """Blocks and spans alike."""
        return [*(text for _, text in self.blocks), *self.spans]


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    blocks = [(language, code) for language, code in _FENCED.findall(text)]
    prose = _FENCED.sub("", text)
    blocks += [("", code) for code in _INDENTED.findall(prose)]
    prose = _INDENTED.sub("", prose)
    spans = [" ".join(span.split()) for span in _SPAN.findall(prose)]
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return Page(path, blocks, spans, _LINK.findall(prose), headings)


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module; they import one another by their bare names."""
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
