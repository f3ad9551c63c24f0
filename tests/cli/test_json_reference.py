"""docs/json.md says what commands print under `--json`."""

import json
import re
import sys
from pathlib import Path

import pytest

from upcycle.cli.app import COMMANDS as NAMES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from make_json_reference import COMMANDS, DEMO, HEAD, PAGE, printed, shape_of  # noqa: E402

BLOCK = re.compile(r"^## ([\w -]+)\n\n.*?```json\n(.*?)```", re.MULTILINE | re.DOTALL)
SECTIONS = dict(BLOCK.findall(PAGE.read_text()))
LIGHT = [command for command in COMMANDS if command.split()[0] in ("inspect", "plan", "capacity")]


def test_every_command_has_its_section() -> None:
    assert PAGE.read_text().startswith(HEAD)
    assert {name.split()[0] for name in SECTIONS} == set(NAMES) - {"demo"}  # it is a run


@pytest.mark.parametrize("command", LIGHT)
def test_the_keys_are_those_that_are_printed(command: str, tmp_path: Path) -> None:
    words = [str(DEMO) if word == "SRC" else word for word in command.split()]
    found = shape_of(printed(words, tmp_path))
    assert json.loads(SECTIONS[words[0]]) == found
