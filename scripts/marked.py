"""The parts of the pages that scripts write: they stand between two markers with a name.

Pages are README.md, CONTRIBUTING.md and docs/*.md. A part may stand in several of them.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pages() -> list[Path]:
    """Every page."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def parts(name: str) -> list[str]:
    """What stands between the markers of a name, once for each page that has them."""
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    return [found for text in texts for found in _pattern(name).findall(text)]


def fill(name: str, text: str) -> None:
    """Put a text between the markers of its name, wherever they stand.

    Raises:
        ValueError: no page has the markers.
    """
    found = 0
    for page in pages():
        filled, times = _pattern(name).subn(
            lambda _: f"{_marker(name, 'begin')}\n{text}\n{_marker(name, 'end')}",
            page.read_text(encoding="utf-8"),
        )
        found += times
        if times:
            page.write_text(filled, encoding="utf-8")
    if not found:
        raise ValueError(f"no page has the markers of {name!r}")


def _pattern(name: str) -> re.Pattern[str]:
    begin, end = (re.escape(_marker(name, which)) for which in ("begin", "end"))
    return re.compile(f"{begin}\n(.*?)\n?{end}", re.DOTALL)


def _marker(name: str, which: str) -> str:
    return f"<!-- {name}:{which} -->"
