"""`upcycle sweep`: what each number of KV heads saves, and how far it moves the outputs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from upcycle.checkpoint.staging import check_place
from upcycle.cli.arguments import HtmlFile, KvDtype, Source
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.flags import Only
from upcycle.errors import PlanError
from upcycle.evaluation.drift import DriftSweep
from upcycle.kvcache.cache_dtype import asked_dtype
from upcycle.kvcache.layout import config_of
from upcycle.options.convert import MergeOptions
from upcycle.options.evaluate import EvaluateOptions

_READ = Only(("text", "max_tokens", "sequence_length", "device", "dtype"))
_MERGED = Only(
    (
        "method",
        "calibration",
        "calibration_weights",
        "calibration_tokens",
        "calibration_window",
        "seed",
        "drop_extra_attention",
    )
)


@command("sweep", epilog="Example: upcycle sweep recipes/demo-source --kv-heads 8,4,2,1")
def sweep_command(
    console: Console,
    source: Source,
    kv_heads: Annotated[
        str | None,
        typer.Option("--kv-heads", help="Such as 8,4,2,1. [default: all up to the model's own]"),
    ] = None,
    reading: Annotated[EvaluateOptions, _READ] = EvaluateOptions(max_tokens=4096),
    merging: Annotated[MergeOptions, _MERGED] = MergeOptions(),
    kv_dtype: KvDtype = "bf16",
    html: HtmlFile = None,
) -> Outcome:
    """Convert to each number of KV heads and measure how far the outputs move, without training.

    Drift is not loss of quality: training heals most of it, and `upcycle eval` measures the rest.
    """
    heads = _numbers(kv_heads)
    cached = asked_dtype("bf16" if kv_dtype is None else kv_dtype, lambda: config_of(source)).name
    if html is not None:
        check_place(html, [Path(source), *reading.text, *merging.calibration])

    from upcycle.pipeline.sweep import sweep_kv_heads

    with console.progress() as watch:
        sweep = sweep_kv_heads(source, merging, reading, kv_heads=heads, watch=watch)
    if html is not None:
        from upcycle.report.sweep_page import write_sweep_page

        write_sweep_page(sweep, html, source=source, kv_dtype=cached)
    _show(console, source, sweep, cached)
    return Outcome({"source": source, "kv_dtype": cached, **asdict(sweep)})


def _numbers(text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise PlanError(
            f"{text!r} is no list of numbers of KV heads",
            where="--kv-heads",
            fix="give numbers with commas between them, such as 8,4,2,1",
        )
    return [int(word) for word in words]


def _show(console: Console, source: str, sweep: DriftSweep, kv_dtype: str) -> None:
    from upcycle.report.sweep_page import DRIFT_NOTE, identical_line, layer_rows, overview_rows

    text = sweep.text
    console.print(
        f"{source}: {sweep.method}, {text.tokens:,} tokens of {text.name}, "
        f"{sweep.dtype} on {sweep.device}"
    )
    if text.losses:
        console.print(f"not all of the text was used: {text.losses}")
    header, *rows = overview_rows(sweep, kv_dtype)
    console.table(header, rows)
    console.print()
    console.print("hidden state after each layer, RMS of the difference relative to the source's")
    header, *rows = layer_rows(sweep)
    console.table(header, rows)
    console.print()
    for line in (sweep.nothing_to_merge, identical_line(sweep)):
        if line:
            console.print(line)
    console.print(DRIFT_NOTE)
