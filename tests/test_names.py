"""One name, one meaning: no public class or function of the package is defined in two modules."""

import ast
from collections import defaultdict
from pathlib import Path

import upcycle

PACKAGE = Path(upcycle.__file__).parent
# The entry point and what it runs.
MEANT = {"main"}


def defined_twice(folder: Path) -> dict[str, list[str]]:
    """The modules of each public class or function that several define, by its name."""
    places = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(folder)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_name_has_two_meanings() -> None:
    found = defined_twice(PACKAGE)
    assert {name: found[name] for name in found.keys() - MEANT} == {}
    assert found.keys() >= MEANT, "what stands once needs no exception"


def test_a_name_with_two_meanings_is_found(tmp_path: Path) -> None:
    for room in ("heads", "export"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "planted.py").write_text("class Part:\n    def save(self): ...\n")
    assert defined_twice(tmp_path) == {"Part": ["export/planted.py", "heads/planted.py"]}
