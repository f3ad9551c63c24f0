"""`upcycle graph`: what a Core ML program does and moves."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from upcycle.byte_sizes import parse_bytes
from upcycle.cli.arguments import HtmlFile
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import ExportError, UpcycleError

_BANDWIDTH = "55900MB/s"


@command("graph", epilog="Example: upcycle graph model.mlpackage --bandwidth 100GB/s")
def graph_command(
    console: Console,
    package: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.mlpackage", help="A Core ML package, anyone's, or a folder of chunks."
        ),
    ],
    bandwidth: Annotated[
        str,
        typer.Option(
            "--bandwidth",
            help="Memory bandwidth of the model, in bytes/s; the default was fitted to a 1.2B "
            "model's decoding speed measured on a phone.",
        ),
    ] = _BANDWIDTH,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Bytes per token of all but the cache, such as 778MB, for a comparison with a "
            "model of the same attention; by default this package's.",
        ),
    ] = None,
    measured: Annotated[
        float | None,
        typer.Option(
            "--measured", help="Tokens/s that a device reached; shows the bytes that implies."
        ),
    ] = None,
    html: HtmlFile = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a lint finds an error.")
    ] = False,
) -> Outcome:
    """Count operations, copies of K and V, and the bytes that a token moves; lint the program."""
    from upcycle.checkpoint.staging import check_place
    from upcycle.program.description import describe_package

    options: dict[str, Any] = {"bandwidth": _parse_bandwidth(bandwidth)}
    if bandwidth != _BANDWIDTH:
        options["bandwidth_source"] = "given by --bandwidth"
    if weights is not None:
        options["without_cache"] = parse_bytes(weights, where="--weights")
    if measured is not None and not 0 < measured < math.inf:
        raise ExportError(
            f"a measured speed of {measured:g} tokens/s is none",
            where="--measured",
            fix="pass tokens per second, such as 20.39",
        )
    if html is not None:
        check_place(html, [package])
    document = describe_package(package, measured=measured, **options)
    if (chunk := document["chunk"]) is not None:
        last = chunk["first_layer"] + chunk["num_layers"] - 1
        console.print(
            f"chunk {chunk['number']} of {chunk['of']}, layers {chunk['first_layer']} to {last}: "
            "all that follows is of this chunk, and a token goes through all of them"
        )
    for name, function in document["functions"].items():
        _show_function(console, name, function)
    _show_findings(console, document["findings"])
    _show_comparison(console, document)
    if html is not None:
        from upcycle.pages.page import write_page

        write_page(html, "graph.html.j2", **document)
        console.print(f"wrote {html}")
    errors = any(finding["severity"] == "error" for finding in document["findings"])
    return Outcome(document, passed=not (strict and errors))


def _show_function(console: Console, name: str, function: dict[str, Any]) -> None:
    counts = function["operations"]
    console.print(f"function {name}: {sum(counts.values()):,} operations")
    console.print("  " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items()))
    for kind, label in (("kv", "of K and V"), ("other", "other")):
        tiles = function["tiles"][kind]
        console.print(f"  tile {label}: {tiles['count']}, {format_bytes(tiles['bytes'])}")
    for state, shape in function["states"].items():
        writes = function["state_writes"][state]
        console.print(f"  state {state} {shape}: {writes} writes")
    caches = function["caches"]
    if caches["inputs"]:
        console.print(
            f"  caches as inputs: {len(caches['inputs'])}, K and V given out: "
            f"{len(caches['outputs'])}"
        )
    _show_traffic(console, function)
    console.print()


def _show_traffic(console: Console, function: dict[str, Any]) -> None:
    parts = function["traffic"]
    if parts is None:
        weights, states = (format_bytes(function[key]) for key in ("weight_bytes", "state_bytes"))
        console.print("  shapes are dynamic: bytes per call are not defined")
        console.print(f"  weights take {weights}, states {states}")
        return
    tokens = function["tokens_per_call"] or 1
    header = ["  bytes per call", "MB"] + (["MB per token"] if tokens > 1 else [])
    console.table(
        header,
        [
            [f"  {name.replace('_', ' ')}", f"{count / 1e6:,.3f}"]
            + ([f"{count / tokens / 1e6:,.3f}"] if tokens > 1 else [])
            for name, count in parts.items()
        ],
    )
    of_tokens = f" of {tokens} tokens" if tokens > 1 else ""
    console.print(f"  at most {function['calls_per_second']:,.2f} calls/s{of_tokens}")


def _show_findings(console: Console, findings: list[dict[str, Any]]) -> None:
    for found in findings:
        count = len(found["places"])
        where = f"{found['function'] or 'package'}, {found['places'][0]}"
        more = f" and {count - 1} more" if count > 1 else ""
        console.print(f"{found['severity']}: {found['lint']}: {found['what']}")
        console.print(f"  where: {where}{more}")
        console.print(f"  fix: {found['fix']}")
    if not findings:
        console.print("no lint has found anything")


def _show_comparison(console: Console, document: dict[str, Any]) -> None:
    speed = document["bandwidth"] / 1e6
    console.print()
    console.print(f"weights of the package: {document['weight_bytes'] / 1e6:,.3f} MB")
    if document["compared"]:
        console.table(
            ["decoding with a full cache", "KV heads", "MB/token", "tok/s"],
            [
                [
                    row["name"],
                    str(row["num_key_value_heads"]),
                    f"{row['bytes_per_token'] / 1e6:,.2f}",
                    f"{row['tokens_per_second']:,.2f}",
                ]
                for row in document["compared"]
            ],
        )
        rest = document["without_cache"]
        held = "this graph's" if rest is None else f"{rest / 1e6:,.2f} MB/token"
        console.print(f"bytes beside the cache are held at {held}; a bound, not a measured speed")
    console.print(f"bandwidth: {speed:,.0f} MB/s, {document['bandwidth_source']}")
    if document["measured"]:
        implied = document["measured"]["implied_bytes_per_token"] / 1e6
        console.print(
            f"implied by the measured {document['measured']['tokens_per_second']:g} tok/s: "
            f"{implied:,.0f} MB/token"
        )


def _parse_bandwidth(text: str) -> int:
    size = text.strip().removesuffix("/s")
    try:
        speed = parse_bytes(size, where="--bandwidth")
    except UpcycleError:
        speed = 0
    if speed == 0 or size.endswith("b"):  # a small b stands for bits
        raise ExportError(
            f"{text!r} is no memory bandwidth",
            where="--bandwidth",
            fix="pass bytes per second, with a capital B, such as 100GB/s",
        )
    return speed
