"""The report in a real browser: it renders, and neither console nor network hear of it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.example import example
from upcycle.report.render import render_html

pytestmark = pytest.mark.slow
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own services stay unreached
]
ADDRESS = "http://report.invalid/picture.png"


def open_page(html: str, folder: Path) -> tuple[str, list[str], set[str]]:
    """The rendered document, the console's messages, and every address asked of the network."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is needed; scripts/test --all installs it"
    page, log = folder / "page.html", folder / "net.json"
    page.write_text(html)
    done = subprocess.run(
        [
            chromium,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            "--net-log-capture-mode=Everything",
            "--virtual-time-budget=2000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(log.read_text())["events"]
    requests = [event.get("params", {}) for event in events]
    # The browser itself asks for the time and for updates; the page's requests bear its origin.
    addresses = {
        request["url"]
        for request in requests
        if request.get("network_isolation_key", "").startswith("file://")
        and not request["url"].startswith("file://")
    }
    return done.stdout, console, addresses


def test_the_report_renders_without_a_word_to_console_or_network(tmp_path: Path) -> None:
    dom, console, addresses = open_page(render_html(example()), tmp_path)
    assert "uptrained fails 1 of 2 margins." in dom
    assert dom.count("<svg") == 4
    assert console == []
    assert addresses == set()


def test_a_planted_request_and_a_planted_error_are_seen(tmp_path: Path) -> None:
    """The test above can fail: the same page with a picture and a broken script is caught."""
    planted = f"<img src='{ADDRESS}'><script>undefinedFunction()</script></body>"
    html = render_html(example()).replace("</body>", planted)
    html = html.replace("default-src 'none'", "default-src * 'unsafe-inline'")
    _, console, addresses = open_page(html, tmp_path)
    assert any("undefinedFunction" in line for line in console)
    assert addresses == {ADDRESS}
