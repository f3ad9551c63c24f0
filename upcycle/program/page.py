"""The document of `describe_package` as one HTML file that asks nothing of a network."""

from pathlib import Path
from typing import Any

from upcycle.checkpoint.staging import check_place, write_file
from upcycle.pages.formatting import pictured


def render_page(document: dict[str, Any]) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from upcycle.pages import formatting

    environment = Environment(
        loader=PackageLoader("upcycle.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("binary_bytes", "integer", "megabytes", "rate"):
        environment.filters[name] = getattr(formatting, name)
    return pictured(environment.get_template("graph.html.j2").render(document))


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the page, whole or not at all, over an older one.

    Raises:
        OutputError: it cannot be written there, or lies inside a package.
    """
    check_place(path)
    write_file(path, render_page(document))
