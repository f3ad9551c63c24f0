"""The pages of `capacity` and `sweep` in a real browser: the slider works and nothing is asked."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.report.test_browser import open_page
from tests.tiny import tiny_checkpoint
from upcycle.cli import capacity as _capacity  # noqa: F401 - registers the command
from upcycle.cli import sweep as _sweep  # noqa: F401 - registers the command
from upcycle.cli.app import app

pytestmark = pytest.mark.slow
MOVE = """<script>
at("heads").value = at("heads").max;
at("heads").dispatchEvent(new Event("input"));
</script></body>"""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["capacity", "--gpu-memory", "1GB"], {"name": "g=1", "cache": "64\N{NO-BREAK SPACE}B"}),
        (
            ["sweep", "--max-tokens", "60", "--sequence-length", "32"],
            {"name": "g=1", "kind": "MQA"},
        ),
    ],
    ids=["capacity", "sweep"],
)
def test_the_slider_shows_the_choice(
    tmp_path: Path, options: list[str], shown: dict[str, str]
) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    page = tmp_path / "page.html"
    name, *rest = options
    result = CliRunner().invoke(app, [name, str(source), *rest, "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    html = page.read_text().replace("</body>", MOVE)
    dom, console, addresses = open_page(html, tmp_path)
    for key, value in shown.items():
        text = dom.partition(f'id="{key}"')[2].partition(">")[2].partition("<")[0]
        assert text.replace("&nbsp;", "\N{NO-BREAK SPACE}") == value
    assert console == []
    assert addresses == set()
