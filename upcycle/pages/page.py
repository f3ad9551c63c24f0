"""Single HTML pages that ask nothing of a network."""

from pathlib import Path
from typing import Any

from upcycle.checkpoint.staging import write_file
from upcycle.pages import formatting

_FILTERS = ("integer", "binary_bytes", "factor", "percent", "nats")


def write_page(path: Path, template: str, **view: Any) -> None:
    """Render a template of this package into a file, over an older one, whole or not at all.

    Args:
        path: the file; missing folders are made.
        template: the template's file name.
        view: what the template reads.

    Raises:
        OutputError: the file cannot be written.
    """
    write_file(path, render_page(template, **view))


def render_page(template: str, **view: Any) -> str:
    """A template of this package as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("upcycle.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in _FILTERS}
    return formatting.pictured(environment.get_template(template).render(**view))
