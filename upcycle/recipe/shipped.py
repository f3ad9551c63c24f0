"""The demo's recipes, checkpoint and text, which lie in the wheel and in a clone."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
DEMO = "demo.yaml"


def shipped_recipes() -> Path:
    """The folder of the demo's recipes: inside the installed package, or beside it in a clone."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"
