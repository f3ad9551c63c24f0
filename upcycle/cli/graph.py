"""`upcycle graph`: what a Core ML program does and moves."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import ExportError
from upcycle.kvcache.sizes import parse_bytes

if TYPE_CHECKING:
    from upcycle.export.graph import Function, Graph

_BANDWIDTH = "55900MB/s"


@command("graph", epilog="Example: upcycle graph model.mlpackage --bandwidth 100GB/s")
def graph_command(
    console: Console,
    package: Annotated[
        Path, typer.Argument(metavar="OUT.mlpackage", help="A Core ML package, anyone's.")
    ],
    bandwidth: Annotated[
        str,
        typer.Option(
            "--bandwidth",
            help="Memory bandwidth of the model; the default was fitted to a 1.2B model's "
            "decoding speed measured on a phone.",
        ),
    ] = _BANDWIDTH,
) -> Outcome:
    """Count operations, copies of K and V, and the bytes that a token moves."""
    from upcycle.export.graph import read_graph

    speed = _parse_bandwidth(bandwidth)
    graph = read_graph(package)
    functions = {}
    for name, function in graph.functions.items():
        console.print(f"function {name}: {function.histogram.total():,} operations")
        functions[name] = _show_operations(console, function) | _show_traffic(
            console, function, speed
        )
    compared = _show_alternatives(console, graph, speed)
    return Outcome(
        {
            "package": str(package),
            "functions": functions,
            "alternatives": compared,
            "bandwidth": speed,
        }
    )


def _show_operations(console: Console, function: "Function") -> dict[str, Any]:
    counts = dict(function.histogram.most_common())
    console.print("  " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    tiles: dict[str, dict[str, int]] = {}
    for kind, of_kv in (("of K and V", True), ("other", False)):
        sizes = [tile.nbytes for tile in function.tiles if tile.of_kv == of_kv]
        tiles["kv" if of_kv else "other"] = {"count": len(sizes), "bytes": sum(sizes)}
        console.print(f"  tile {kind}: {len(sizes)}, {format_bytes(sum(sizes))}")
    states = {name: list(state.shape) for name, state in function.states.items()}
    for name, shape in states.items():
        console.print(f"  state {name} {shape}: {function.state_writes[name]} writes")
    return {
        "operations": counts,
        "tiles": tiles,
        "states": states,
        "state_writes": dict(function.state_writes),
    }


def _show_traffic(console: Console, function: "Function", speed: float) -> dict[str, Any]:
    from upcycle.export.counting import count_traffic
    from upcycle.export.traffic import tokens_per_second

    if not function.is_static:
        console.print("  shapes are dynamic: bytes per call are not defined")
        return {"traffic": None}
    traffic = count_traffic(function)
    parts = asdict(traffic) | {"total": traffic.total}
    console.print()
    console.table(
        ["bytes per call", "MB"],
        [[name.replace("_", " "), f"{count / 1e6:,.3f}"] for name, count in parts.items()],
    )
    rate = tokens_per_second(traffic.total, speed)
    console.print(f"at {speed / 1e6:,.0f} MB/s at most {rate:,.2f} calls/s")
    return {"traffic": parts, "calls_per_second": rate}


def _show_alternatives(console: Console, graph: "Graph", speed: float) -> list[dict[str, Any]]:
    from upcycle.export.traffic import alternatives, tokens_per_second

    rows = [
        asdict(row) | {"tokens_per_second": tokens_per_second(row.bytes_per_token, speed)}
        for row in alternatives(graph)
    ]
    if rows:
        console.print()
        console.table(
            ["by the closed form", "KV heads", "MB/token", "tok/s"],
            [
                [
                    row["name"],
                    str(row["num_key_value_heads"]),
                    f"{row['bytes_per_token'] / 1e6:,.2f}",
                    f"{row['tokens_per_second']:,.2f}",
                ]
                for row in rows
            ],
        )
        console.print(
            "bytes beside the cache are held at this graph's; a bound, not a measured speed"
        )
    return rows


def _parse_bandwidth(text: str) -> int:
    speed = parse_bytes(text.removesuffix("/s"), where="--bandwidth")
    if speed == 0:
        raise ExportError(
            f"a bandwidth of {text} moves nothing",
            where="--bandwidth",
            fix=f"pass more, such as {_BANDWIDTH}",
        )
    return speed
