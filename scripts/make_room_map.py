"""Write the map of the package's rooms into CONTRIBUTING.md, from the files themselves.

    python scripts/make_room_map.py

Rooms are in the order that `tests/test_import_order.py` enforces, lowest first. What a room is for
is the first line of its docstring, what it imports is read from its files, and its lines are those
of code: docstrings, comments and blank lines apart.
"""

import argparse
import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

from marked import fill

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "upcycle"
COLUMNS = "| room | what is in it | imports, beside the ground | lines |"
NAME = "rooms"
WORDLESS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """One room.

    Attributes:
        name: of the folder, or of the file without its suffix.
        purpose: the first line of its docstring.
        imports: the rooms that it imports, lowest first.
        lines: of code.
    """

    name: str
    purpose: str
    imports: tuple[str, ...]
    lines: int


def rooms() -> list[Room]:
    """All rooms, lowest first."""
    return [_room(name) for name in ORDER]


def _room(name: str) -> Room:
    folder = PACKAGE / name
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]
    first = folder / "__init__.py" if folder.is_dir() else files[0]
    purpose = (ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or "").split("\n")[0]
    imported = {
        module.split(".")[1]
        for file in files
        for _, module in imported_modules(file)
        if "." in module
    }
    arrows = tuple(other for other in ORDER if other in imported - {name})
    return Room(name, purpose, arrows, sum(code_lines(file) for file in files))


def code_lines(file: Path) -> int:
    """Lines of a file that are neither blank nor a comment nor part of a docstring."""
    text = file.read_text(encoding="utf-8")
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in WORDLESS
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def room_map(found: list[Room]) -> str:
    """The rooms as a table. The ground, single files that any room may import, comes first."""
    ground = [room.name for room in found[: ORDER.index("checkpoint")]]
    total = sum(room.lines for room in found)
    rows = [COLUMNS, "|---|---|---|--:|"]
    for room in found:
        arrows = ", ".join(f"`{other}`" for other in room.imports if other not in ground)
        rows.append(f"| `{room.name}` | {room.purpose} | {arrows or 'none'} | {room.lines:,} |")
    largest = max(found, key=lambda room: room.lines)
    summary = (
        f"The ground: {', '.join(f'`{name}`' for name in ground)}. Together {total:,} lines of "
        f"code; the largest room, `{largest.name}`, has {largest.lines / total:.0%} of them."
    )
    return "\n".join([*rows, "", summary])


def without_lines(table: str) -> list[str]:
    """The rows of a map without their last column, which changes with every line of code."""
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    return [row.rsplit("|", 2)[0].strip() for row in rows]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    fill(NAME, room_map(rooms()))


sys.path.insert(0, str(ROOT))
from tests.test_import_order import ORDER, imported_modules  # noqa: E402

if __name__ == "__main__":
    main()
