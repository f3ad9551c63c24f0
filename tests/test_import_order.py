"""The order of the rooms, and what the light commands may import."""

import ast
import graphlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import upcycle

PACKAGE = Path(upcycle.__file__).parent
# Lowest first: a room imports only from itself and from rooms before it.
ORDER = [
    "version",
    "utf8",
    "errors",
    "registry",
    "progress",
    "stopping",
    "memory",
    "byte_sizes",
    "checks",
    "checkpoint",
    "pages",
    "attention",
    "options",
    "families",
    "heads",
    "planning",
    "kvcache",
    "recipe",
    "data",
    "models",
    "program",
    "interpreter",
    "conversion",
    "training",
    "evaluation",
    "export",
    "parity",
    "report",
    "pipeline",
    "cli",
]
# Stages hand each other folders: none imports another.
STAGES = {"conversion", "training", "evaluation", "export"}
HEAVY = {"torch", "transformers", "datasets", "accelerate", "coremltools", "lm_eval"}
TORCH_FREE_ROOMS = [
    "families",
    "attention",
    "options",
    "planning",
    "kvcache",
    "recipe",
    "report",
    "cli",
]


def room_of(path: Path) -> str | None:
    """The room that a file belongs to; the package's own two files stand above all."""
    relative = path.relative_to(PACKAGE)
    if relative.name in ("__init__.py", "__main__.py") and len(relative.parts) == 1:
        return None
    return relative.parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Every `upcycle...` module that a file imports, anywhere in it, with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "upcycle":
                names = [f"upcycle.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.split(".")[0] == "upcycle"]
    return found


def violations(path: Path) -> list[str]:
    room = room_of(path)
    if room is None:
        return []
    found = []
    for line, module in imported_modules(path):
        parts = module.split(".")
        if len(parts) < 2 or parts[1] == "__version__":
            continue
        other = parts[1]
        between_stages = {room, other} <= STAGES and room != other
        if between_stages or ORDER.index(other) > ORDER.index(room):
            found.append(f"{path.relative_to(PACKAGE)}:{line}: {room} imports {other}")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {room_of(path) for path in FILES} - {None}
    assert rooms <= set(ORDER)


def test_imports_follow_the_order() -> None:
    assert [found for path in FILES for found in violations(path)] == []


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = ("upcycle", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def arrows(files: list[Path]) -> dict[str, set[str]]:
    """Which file imports which, wherever in it the import stands, for types alone too."""
    modules = {module_of(path): path for path in files if room_of(path) is not None}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found[module] |= {name if name in modules else str(node.module) for name in names}
    return found


def test_no_files_import_each_other() -> None:
    graphlib.TopologicalSorter(arrows(FILES)).prepare()


def test_files_that_import_each_other_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads").mkdir()
    files = [tmp_path / "heads" / name for name in ("one.py", "other.py")]
    files[0].write_text("def f():\n    from upcycle.heads.other import g\n")
    files[1].write_text("from upcycle.heads import one\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(arrows(files)).prepare()


def test_an_arrow_against_the_order_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads").mkdir()
    planted = tmp_path / "heads" / "planted.py"
    planted.write_text("def f():\n    from upcycle.training import loop\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert violations(planted) == ["heads/planted.py:2: heads imports training"]


def test_an_arrow_between_stages_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "export").mkdir()
    planted = tmp_path / "export" / "planted.py"
    planted.write_text("from upcycle.conversion import convert\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert violations(planted) == ["export/planted.py:1: export imports conversion"]


def imports_of(code: str) -> set[str]:
    """Top-level packages loaded by a fresh interpreter that runs `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("room", TORCH_FREE_ROOMS)
def test_importing_a_light_room_loads_nothing_heavy(room: str) -> None:
    names = [
        ".".join(["upcycle", *path.relative_to(PACKAGE).with_suffix("").parts])
        for path in FILES
        if room_of(path) == room and path.name != "__init__.py"
    ]
    loaded = imports_of("\n".join(f"import {name}" for name in names))
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", "recipes/demo-source"],
        ["plan", "recipes/demo-source", "--kv-heads", "2"],
        ["capacity", "--help"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_light_command_loads_nothing_heavy(arguments: list[str]) -> None:
    root = PACKAGE.parent
    code = f"""
import os, sys
os.chdir({str(root)!r})
sys.argv = ["upcycle", *{arguments!r}]
from upcycle.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert imports_of(code) & HEAVY == set()


def test_every_public_function_survives_importing_every_submodule() -> None:
    for path in FILES:
        relative = path.relative_to(PACKAGE)
        if relative.name not in ("__main__.py",):
            module = ".".join(["upcycle", *relative.with_suffix("").parts]).removesuffix(
                ".__init__"
            )
            importlib.import_module(module)
    for name in upcycle.__all__:
        if name not in ("UpcycleError", "__version__"):
            function = getattr(upcycle, name)
            assert callable(function), name
            assert not isinstance(function, type(sys)), f"{name} is a module"
