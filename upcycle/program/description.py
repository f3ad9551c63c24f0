"""Everything that `upcycle graph` says about a package, as one document."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from upcycle.program.bandwidth import (
    BANDWIDTH,
    BANDWIDTH_SOURCE,
    Alternative,
    alternatives,
    attention_shape,
    exported_shape,
    tokens_per_second,
)
from upcycle.program.chunked import chunk_paths, read_exported
from upcycle.program.counting import Traffic, count_traffic
from upcycle.program.graph import Function, Graph
from upcycle.program.inferred import inferred_shape
from upcycle.program.lints.finding import Finding
from upcycle.program.lints.package import lint_graph
from upcycle.program.noted import noted_manifest
from upcycle.program.reading import read_graph


def describe_package(
    package: str | Path,
    *,
    bandwidth: float = BANDWIDTH,
    bandwidth_source: str = BANDWIDTH_SOURCE,
    without_cache: int | None = None,
    measured: float | None = None,
) -> dict[str, Any]:
    """What a Core ML package does and moves. No weights are loaded.

    Args:
        package: an `.mlpackage`, anyone's, or a folder of chunks, counted as one program.
        bandwidth: B/s.
        bandwidth_source: where that number comes from.
        without_cache: W, the bytes per token of all but the cache, of a model with the same
            attention; by default those of this package.
        measured: tokens/s that a device reached.

    Raises:
        ExportError: it is no Core ML package with an ML program, or a damaged one.
    """
    graph = read_exported(Path(package))
    compared = [*_this_graph(graph, without_cache), *alternatives(graph, without_cache)]
    noted = noted_manifest(graph)
    chunk = noted and noted.result.chunk
    return {
        "package": str(package),
        "chunk": chunk and chunk.document,
        "weight_bytes": graph.weight_bytes,
        "functions": {
            name: _describe_function(function, bandwidth)
            for name, function in graph.functions.items()
        },
        "findings": [asdict(finding) for finding in _findings(Path(package))],
        "attention": attention_shape(graph),
        "attention_source": "manifest" if exported_shape(graph) else "graph",
        "without_cache": without_cache,
        "compared": [
            asdict(row) | {"tokens_per_second": tokens_per_second(row.bytes_per_token, bandwidth)}
            for row in compared
        ],
        "bandwidth": bandwidth,
        "bandwidth_source": bandwidth_source,
        "measured": measured
        and {"tokens_per_second": measured, "implied_bytes_per_token": bandwidth / measured},
    }


def _findings(package: Path) -> Iterator[Finding]:
    """Those of each package: what the rules say is of what a device loads at once."""
    paths = chunk_paths(package)
    for path in paths:
        for finding in lint_graph(read_graph(path)):
            place = " ".join(filter(None, (path.stem, finding.function)))
            yield finding if paths == [package] else replace(finding, function=place)


def _this_graph(graph: Graph, without_cache: int | None) -> list[Alternative]:
    """The row of the package itself, its cache and copies as counted in it."""
    shape = attention_shape(graph)
    if shape is None or not graph.decode.is_static:
        return []
    traffic = count_traffic(graph.decode)
    rest = traffic.without_cache if without_cache is None else without_cache
    moved = rest + traffic.kv_read + traffic.copies
    return [Alternative("this graph", shape["num_key_value_heads"], moved)]


def _describe_function(function: Function, bandwidth: float) -> dict[str, Any]:
    return {
        "operations": dict(function.histogram.most_common()),
        "tiles": {"kv": _tiles(function, of_kv=True), "other": _tiles(function, of_kv=False)},
        "inputs": _shapes(function, function.inputs),
        "caches": {
            "inputs": list(function.kv.cache_inputs),
            "outputs": list(function.kv.cache_outputs),
        },
        "states": {name: list(state.shape) for name, state in function.states.items()},
        "state_writes": dict(function.state_writes),
        "weight_bytes": function.weight_bytes,
        **_describe_traffic(function, bandwidth),
    }


def _describe_traffic(function: Function, bandwidth: float) -> dict[str, Any]:
    """Bytes by class per call; None where shapes are dynamic, and then what is known of them."""
    if not function.is_static:
        cache = sum(state.nbytes for state in function.states.values())
        return {"traffic": None, "state_bytes": cache}
    traffic: Traffic = count_traffic(function)
    shape = inferred_shape(function)
    return {
        "traffic": asdict(traffic) | {"total": traffic.total},
        "tokens_per_call": shape and shape["tokens"],
        "calls_per_second": tokens_per_second(traffic.total, bandwidth),
    }


def _tiles(function: Function, *, of_kv: bool) -> dict[str, int]:
    sizes = [tile.nbytes for tile in function.tiles if tile.of_kv == of_kv]
    return {"count": len(sizes), "bytes": sum(sizes)}


def _shapes(function: Function, names: tuple[str, ...]) -> Mapping[str, str]:
    """Shapes as declared, or as the program has them."""
    return {name: function.declared.get(name, str(function.types[name].shape)) for name in names}
