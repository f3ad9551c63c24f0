"""Draw the demo's figures, from recipes/demo.result.json to docs/demo.svg.

    python scripts/demo_picture.py

Plain SVG without a library, so that the same figures give the same bytes everywhere.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LEFT, BAR, ROW, PANEL = 720, 84, 200, 24, 350
COLOURS = {"source": "#6b7280", "converted": "#c2571a", "uptrained": "#1f6feb"}
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float], str], ...] = (
    ("KV cache, bytes per token", lambda model: model["kv_bytes_per_token"], ",.0f"),
    ("NLL on held-out text, nats per token", lambda model: model["nll"], ".2f"),
)


def picture(result: dict[str, Any]) -> str:
    """The cache and the likelihood of every model of a result, as bars from zero."""
    models = result["models"]
    height = 62 + ROW * len(models)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{'; '.join(_told(model) for model in models)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for number, (title, value, form) in enumerate(PANELS):
        at = LEFT + number * PANEL
        most = max(value(model) for model in models)
        lines.append(_text(at, 28, 'font-weight="bold"', title))
        for row, model in enumerate(models):
            top = 44 + row * ROW
            length = BAR * value(model) / most
            colour = COLOURS.get(model["label"], "#444444")
            lines += [
                _text(at - 8, top + 13, 'text-anchor="end"', model["label"]),
                f'<rect x="{at}" y="{top}" width="{length:.1f}" height="16" fill="{colour}"/>',
                _text(at + length + 6, top + 13, "", f"{value(model):{form}}"),
            ]
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" {style} fill="#111111">{text}</text>'


def _told(model: dict[str, Any]) -> str:
    return f"{model['label']}: " + ", ".join(
        f"{title} {value(model):{form}}" for title, value, form in PANELS
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    result = json.loads((ROOT / "recipes" / "demo.result.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "demo.svg").write_text(picture(result), encoding="utf-8")


if __name__ == "__main__":
    main()
