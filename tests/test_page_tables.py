"""What scripts write into the pages is what their committed results and the files say now."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, script


def result(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", ["demo", "demo-5pct"])
def test_the_demo_tables_are_the_committed_results(name: str) -> None:
    table = script("measure_demo").table(result(f"recipes/{name}.result.json"))
    assert script("marked").parts(name) == [table]


def test_the_demo_picture_is_the_committed_result() -> None:
    drawn = script("demo_picture").picture(result("recipes/demo.result.json"))
    assert (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("name", ["demo", "scrambled", "smollm2"])
def test_the_leaderboards_are_the_committed_results(name: str) -> None:
    table = script("leaderboard").table(result(f"recipes/leaderboard/{name}.json"))
    assert script("marked").parts(f"leaderboard-{name}") == [table]


def test_the_tables_of_declarations_are_the_families() -> None:
    """The numbers in the other tables are measured; these say only what is declared."""
    tables, parts = script("make_family_table"), script("marked").parts
    assert parts("refusals") == [tables.refusal_table()]
    assert parts("retarget-engines") == [tables.engine_table()]
    assert set(parts("family-counts")) == {tables.counts()}


def test_the_room_map_is_that_of_the_imports() -> None:
    """Its count of lines may be older; `python scripts/make_room_map.py` makes it anew."""
    rooms = script("make_room_map")
    (written,) = script("marked").parts(rooms.NAME)
    assert rooms.without_lines(written) == rooms.without_lines(rooms.room_map(rooms.rooms()))
    assert all(room.purpose.endswith(".") for room in rooms.rooms())


def test_lines_of_code_leave_out_what_explains(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text('"""Two\n\nlines."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    "What."\n')
    assert script("make_room_map").code_lines(file) == 3


def test_a_part_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        script("marked").fill("nowhere", "text")
