"""report.json to Markdown and HTML."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.example import HOSTILE, example
from upcycle.report.render import render_html, render_markdown, write_report
from upcycle.report.schema import ReportDocument, read_document


class Structure(HTMLParser):
    """Collects ids and addresses, and checks that elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                self.addresses.append(value or "")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(example())


@pytest.fixture(scope="module")
def structure(html: str) -> Structure:
    parser = Structure()
    parser.feed(html)
    return parser


def test_elements_nest_and_ids_are_unique(structure: Structure) -> None:
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))


def test_the_html_refers_to_nothing_outside_itself(html: str, structure: Structure) -> None:
    assert all(address.startswith("#") for address in structure.addresses)
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_every_reference_inside_a_plot_has_its_target(html: str, structure: Structure) -> None:
    references = {address[1:] for address in structure.addresses}
    references |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert references
    assert references <= set(structure.ids)


def test_texts_of_models_cannot_become_markup(structure: Structure) -> None:
    assert "script" not in structure.tags
    assert HOSTILE in structure.text


def test_plots_take_their_colours_from_the_page(html: str) -> None:
    assert html.count("<svg") == 4
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    assert {"var(--series-0)", "var(--series-1)", "var(--series-2)", "var(--ink)"} <= set(
        re.findall(r"var\(--[\w-]+\)", drawn)
    )


def test_every_colour_has_a_dark_one(html: str) -> None:
    light, dark = html.split("prefers-color-scheme: dark", 1)
    names = set(re.findall(r"(--[\w-]+): #", light))
    assert len(names) > 10
    assert names == set(re.findall(r"(--[\w-]+): #", dark.split("@media print")[0]))


def test_the_verdict_names_the_margin_that_failed(structure: Structure) -> None:
    assert "uptrained fails 1 of 2 margins." in structure.text
    assert "limit 0.0300 nats per token" in structure.text


def test_without_margins_log_or_export_nothing_is_invented() -> None:
    bare = example(margins=False, training=False, export=False)
    for text in (render_html(bare), render_markdown(bare)):
        assert "No margins set" in text
        assert "Uptraining" not in text
        assert "Core ML" not in text


def test_markdown_has_the_table_and_the_numbers() -> None:
    lines = render_markdown(example()).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| | source"))
    assert lines[header] == "| | source | converted | uptrained |"
    assert lines[header + 1] == "|:--|--:|--:|--:|"
    assert "| KV cache per token, bytes, float16 | 4,096 | 1,024 | 1,024 |" in lines
    assert "| NLL, nats/token | 3.4012 | 4.2231 | 3.4466 |" in lines
    assert "| merged, Q-fold | 2 | 0 | 7.32 | 7,642 |" in lines


def test_every_markdown_table_has_rows_of_one_width() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", render_markdown(example()), flags=re.MULTILINE)
    assert len(tables) == 6
    for table in tables:
        rows = table.replace("\\|", "").splitlines()
        assert len({row.count("|") for row in rows}) == 1


def test_a_code_block_ends_where_it_should() -> None:
    """The hostile text holds three backticks; its fence has four."""
    text = render_markdown(example())
    block = re.search(r"^````text\n(.*?)^````$", text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    assert block[1].endswith(HOSTILE + "\n")


def test_the_files_are_made_from_the_json_alone(tmp_path: Path) -> None:
    write_report(example(), tmp_path / "first")
    stored = read_document(ReportDocument, tmp_path / "first" / "report.json")
    assert stored == example()
    write_report(stored, tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == ["report.html", "report.json", "report.md"]
    for name in names:
        first, second = (tmp_path / run / name for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_report_is_written_over_an_older_one(tmp_path: Path) -> None:
    write_report(example(export=False), tmp_path)
    write_report(example(), tmp_path)
    assert "Core ML export" in (tmp_path / "report.html").read_text()
