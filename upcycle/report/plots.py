"""Plots as SVG text that takes its colours and font from the page around it.

Matplotlib draws with placeholder colours; each is then replaced by a CSS variable, so that one
drawing serves light and dark.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from upcycle.conversion.measured import MeasuredLayer
from upcycle.evaluation.results import Model
from upcycle.pages.formatting import binary_bytes
from upcycle.report.schema import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 6.0, 3.5  # inches; 72 SVG units each
LEGEND_ROW, LEGEND_CHARACTERS = 0.22, 62
INK, MUTED, GRID = "#010203", "#010204", "#010205"
SERIES = ["#010210", "#010211", "#010212", "#010213", "#010214", "#010215"]
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    **{color: f"var(--series-{i})" for i, color in enumerate(SERIES)},
}
_STYLES = ["--", "-.", "-", ":", (0, (5, 1)), (0, (1, 1))]
_MARKERS = ["o", "s", "D", "^", "v", "P"]


def loss_curve(training: Training) -> str:
    """Training loss of each step, and the held-out KL where it was measured.

    What was not finite leaves a gap.
    """

    def draw(axes: "Axes") -> None:
        steps = [point.step for point in training.points]
        losses = _gapped(point.loss for point in training.points)
        divergences = _gapped(point.kl for point in training.held_out)
        axes.plot(steps, losses, color=SERIES[0], linewidth=1.2, label="training loss")
        if training.held_out:
            axes.plot(
                [point.step for point in training.held_out],
                divergences,
                color=SERIES[2],
                marker="D",
                markersize=4,
                label="held-out KL",
            )
        values = [value for value in losses + divergences if math.isfinite(value)]
        if values and min(values) > 0:
            _logarithmic(axes, values)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("nats per token")

    return _render("loss", draw)


def losses_by_layer(layers: Sequence[MeasuredLayer]) -> str:
    """What merging left behind in each layer, as a calibrated conversion measured it.

    Args:
        layers: of the conversion's manifest.
    """

    def draw(axes: "Axes") -> None:
        numbers = [layer.layer for layer in layers]
        lines = {
            "keys lost": [layer.residual.keys for layer in layers],
            "values lost": [layer.residual.values for layer in layers],
        }
        refined = [layer.refinement for layer in layers if layer.refinement]
        if len(refined) == len(layers):
            lines["output error before refining"] = [fit.before for fit in refined]
            lines["output error after"] = [fit.after for fit in refined]
        for index, (label, values) in enumerate(lines.items()):
            axes.plot(numbers, [100 * v for v in values], label=label, **_series(index))
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("layer")
        axes.set_ylabel("energy, %")

    return _render("layers", draw)


def kl_by_position(models: Sequence[Model]) -> str:
    """Mean KL of each candidate over the context that a token had."""

    def draw(axes: "Axes") -> None:
        for index, model in enumerate(models):
            if model.divergence is None:
                continue
            buckets = model.divergence.by_position
            axes.plot(
                [(bucket.first + bucket.last) / 2 for bucket in buckets],
                [bucket.kl_mean for bucket in buckets],
                label=model.label,
                **_series(index),
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_plain)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("preceding tokens in the window")
        axes.set_ylabel("KL(source ‖ model), nats")

    return _render("position", draw)


def cache_by_context(models: Sequence[Model]) -> str:
    """Bytes of the KV cache of one sequence by its length; equal curves are drawn once."""

    def draw(axes: "Axes") -> None:
        lengths = [2**power for power in range(9, 18)]
        sizes: dict[int, list[int]] = {}
        for index, model in enumerate(models):
            sizes.setdefault(model.kv_cache.bytes_per_token, []).append(index)
        for size, indices in sizes.items():
            style = _series(indices[-1])
            label = _joined([models[index].label for index in indices])
            axes.plot(lengths, [length * size for length in lengths], label=label, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))
        axes.yaxis.set_major_formatter(lambda value, _: binary_bytes(value))
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("KV cache of one sequence")

    return _render("cache", draw)


def nll_histogram(models: Sequence[Model]) -> str:
    """How often a token became more or less likely than under the source, and by how much."""

    def draw(axes: "Axes") -> None:
        for index, model in enumerate(models):
            if model.divergence is None:
                continue
            histogram = model.divergence.nll_histogram
            total = sum(histogram.counts)
            style = _series(index)
            axes.stairs(
                [100 * count / total for count in histogram.counts],
                histogram.edges,
                label=model.label,
                color=style["color"],
                linestyle=style["linestyle"],
                linewidth=1.6,
            )
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.set_xlabel("NLL difference from the source, nats (ends hold the tails)")
        axes.set_ylabel("tokens, %")

    return _render("histogram", draw)


def _render(name: str, draw: Callable[["Axes"], None]) -> str:
    """Draw on fresh axes and return the SVG element, without a size of its own."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 11.5,
        "axes.axisbelow": True,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.minor.bottom": False,
        "ytick.minor.left": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        _legend(figure, axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name)


def _legend(figure: "Figure", axes: "Axes") -> None:
    """A legend above the axes, in as many columns as its labels allow; the figure grows by it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + 6))
    rows = -(-len(labels) // columns)
    figure.set_figheight(HEIGHT + LEGEND_ROW * rows)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, borderpad=0
    )


def _inline(svg: str, name: str) -> str:
    """Cut the SVG element out; make its ids unique on the page and its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 var(--sans)", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.strip()


def _joined(labels: Sequence[str]) -> str:
    """One label for models whose curves are the same."""
    joined = ", ".join(labels)
    return joined if len(joined) <= 40 else f"{labels[-1]} and {len(labels) - 1} more"


def _series(index: int) -> dict[str, Any]:
    """The look of the model at `index`; the source is 0."""
    turn = index % len(SERIES)
    return {
        "color": SERIES[turn],
        "linestyle": _STYLES[turn],
        "marker": _MARKERS[turn],
        "markersize": 4,
        "linewidth": 1.8,
    }


def _gapped(values: Iterable[float | None]) -> list[float]:
    """Values to draw; nothing is drawn where there is none."""
    return [math.nan if value is None else value for value in values]


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _logarithmic(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5, or at the decades alone where it is long."""
    from matplotlib.ticker import LogLocator, NullFormatter

    narrow = max(values) < 100 * min(values)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _thousands(value: float) -> str:
    return f"{value / 1024:g} Ki" if value >= 1024 else f"{value:g}"
