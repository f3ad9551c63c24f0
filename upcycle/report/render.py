"""report.json to report.md and report.html, from the document alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from upcycle.checkpoint.manifest import REPORT_NAME, Manifest
from upcycle.checkpoint.staging import write_file
from upcycle.conversion.measured import measured_layers
from upcycle.pages.formatting import pictured
from upcycle.pages.page import template_environment
from upcycle.report import summary
from upcycle.report.schema import ReportDocument
from upcycle.utf8 import to_json

if TYPE_CHECKING:
    from jinja2 import Environment

MARKDOWN_NAME, HTML_NAME = "report.md", "report.html"


def write_report(document: ReportDocument, folder: Path) -> None:
    """Write report.json, report.md and report.html into `folder`, over older ones.

    Each is written whole or not at all, and none before all three are made. The HTML is one file
    that asks nothing of a network: styles and plots are inside it.

    Raises:
        OutputError: one cannot be written.
    """
    pages = {
        REPORT_NAME: to_json(document.to_dict(), indent=2) + "\n",
        MARKDOWN_NAME: render_markdown(document),
        HTML_NAME: render_html(document),
    }
    for name, text in pages.items():
        write_file(folder / name, text)


def render_markdown(document: ReportDocument) -> str:
    """The report as GitHub Markdown, without plots."""
    template = _environment(autoescape=False).get_template("report.md.j2")
    return pictured(template.render(_view(_readable(document))).strip() + "\n")


def render_html(document: ReportDocument) -> str:
    """The report as one HTML file with inlined SVG plots."""
    from markupsafe import Markup

    from upcycle.report import plots

    document = _readable(document)
    models = document.comparison.models
    drawn = {
        "kl_by_position": plots.kl_by_position(models),
        "nll_histogram": plots.nll_histogram(models),
        "cache_by_context": plots.cache_by_context(models),
    }
    if document.training:
        drawn["loss_curve"] = plots.loss_curve(document.training)
    layers = [measured_layers(entry.manifest) for entry in document.provenance if entry.manifest]
    measured = next(filter(None, layers), None)
    if measured:
        drawn["losses_by_layer"] = plots.losses_by_layer(measured)
    template = _environment(autoescape=True).get_template("report.html.j2")
    svgs = {name: Markup(svg) for name, svg in drawn.items()}
    return pictured(template.render(_view(document), plots=svgs))


def _readable(document: ReportDocument) -> ReportDocument:
    """What report.json says, so that all three say the same."""
    return TypeAdapter(ReportDocument).validate_python(document.to_dict())


def _view(document: ReportDocument) -> dict[str, Any]:
    """What both templates read."""
    comparison = document.comparison
    return {
        **vars(document),
        "title": summary.title(comparison),
        "verdict": summary.verdict(comparison),
        "key_figures": summary.key_figures(comparison),
        "sections": summary.sections(comparison),
        "window_rule": summary.window_rule(comparison.text),
        "models": comparison.models,
        "judged": comparison.models[-1],
        "margin_names": summary.MARGIN_NAMES,
        "margin_lines": summary.margin_lines(comparison),
        "export_names": summary.EXPORT_NAMES,
    }


def _environment(*, autoescape: bool) -> "Environment":
    environment = template_environment(autoescape=autoescape, keep_trailing_newline=True)
    environment.filters["cell"] = _markdown_cell
    environment.filters["fenced"] = _fenced
    environment.filters["code_cell"] = _code_cell
    environment.filters["json"] = _json
    environment.globals["continuation_note"] = summary.continuation_note
    return environment


def _json(manifest: Manifest) -> str:
    return to_json(manifest.document, indent=2)


def _markdown_cell(value: object) -> str:
    """A text that cannot end its table cell."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _code_cell(text: str) -> str:
    """A code span in a table cell; a zero-width space keeps backticks from ending it."""
    return "`` " + text.replace("``", "`\N{ZERO WIDTH SPACE}`").replace("|", "\\|") + " ``"


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
