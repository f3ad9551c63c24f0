"""Single HTML pages that ask nothing of a network."""

from inspect import getmembers, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.staging import check_place, write_file
from upcycle.pages import formatting

if TYPE_CHECKING:
    from jinja2 import Environment


def write_page(path: Path, template: str, **view: Any) -> None:
    """Render a template of this package into a file, over an older one, whole or not at all.

    Args:
        path: the file; missing folders are made.
        template: the template's file name.
        view: what the template reads.

    Raises:
        OutputError: the file cannot be written there, or lies inside a package.
    """
    check_place(path)
    write_file(path, render_page(template, **view))


def render_page(template: str, **view: Any) -> str:
    """A template of this package as HTML."""
    return formatting.pictured(template_environment().get_template(template).render(**view))


def template_environment(
    *, autoescape: bool = True, keep_trailing_newline: bool = False
) -> "Environment":
    """Where all templates of this package are found; every function of `formatting` is a filter."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("upcycle.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
    )
    environment.filters |= dict(getmembers(formatting, isfunction))
    return environment
