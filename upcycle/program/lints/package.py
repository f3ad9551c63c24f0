"""Lints of a whole package: its size, what its functions share, what its maker promised.

And every lint over a package.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from upcycle.program.graph import METADATA_KEY, Function, Graph
from upcycle.program.lints.attention import ATTENTION_LINTS
from upcycle.program.lints.finding import Finding, Found, Lint
from upcycle.program.lints.numbers import NUMBER_LINTS
from upcycle.program.lints.shapes import SHAPE_LINTS
from upcycle.program.lints.states import STATE_LINTS
from upcycle.program.noted import noted_manifest

_MOST_WEIGHTS = 2_000_000_000  # bytes
_VERSION_KEY = "com.github.apple.coremltools.version"
_CRASHING = "9.0"  # 8.3 made packages of the same source that did not crash
_SHARED = 1.02  # a package may be this much larger than its largest function


def _larger_than(limit: int, up_to: float = math.inf) -> Callable[[Graph], Iterator[Found]]:
    def check(graph: Graph) -> Iterator[Found]:
        if limit < graph.weight_bytes <= up_to:
            yield "weights", f"{graph.weight_bytes:,} B of weights"

    return check


def _unshared(graph: Graph) -> Iterator[Found]:
    alone = {name: function.weight_bytes for name, function in graph.functions.items()}
    largest = max(alone, key=alone.__getitem__)
    if graph.weight_bytes > _SHARED * alone[largest]:
        yield largest, f"{graph.weight_bytes:,} B of weights, of which it needs {alone[largest]:,}"


def _several_masks(graph: Graph) -> Iterator[Found]:
    for name, function in graph.functions.items():
        masks = [value for value in function.inputs if "mask" in value.lower()]
        if len(masks) > 1:
            yield name, f"{len(masks)} masks: {', '.join(masks)}"


def _palettes_beside_states(graph: Graph) -> Iterator[Found]:
    if not _converter_of(graph).startswith(_CRASHING):
        return
    for function in graph.functions.values():
        small = palettes_of_4_bits(function)
        if small and function.states:
            yield small[0], f"{len(small)} palettes of 4 bits beside {len(function.states)} states"


def _converter_of(graph: Graph) -> str:
    """The version of coremltools that made a package; the suspected one where it is not noted."""
    noted = graph.metadata.get(_VERSION_KEY)
    manifest = noted_manifest(graph)
    if noted is None and manifest is not None:
        noted = manifest.versions.get("coremltools")
    return _CRASHING if noted is None else noted


def palettes_of_4_bits(function: Function) -> list[str]:
    """The weights of a function that are stored as indices of 4 bits into palettes."""
    return [
        op.outputs[0]
        for op in function.operations
        if op.type == "constexpr_lut_to_dense"
        and function.types[op.inputs["indices"][0]].dtype == "uint4"
    ]


def _dropped_layers(graph: Graph) -> Iterator[Found]:
    """Linear layers and cache writes against the manifest of `upcycle export`."""
    manifest = noted_manifest(graph)
    if manifest is None:
        return
    decoder = manifest.result.decoder
    for name, function in graph.functions.items():
        counts = {
            "linear layers": (_linears(function), decoder.num_linears),
            "cache writes": (len(function.kv.updates), 2 * decoder.num_layers),
        }
        for what, (found, expected) in counts.items():
            if found < expected:
                yield name, f"{found} {what} instead of {expected}"


def _broken_manifest(graph: Graph) -> Iterator[Found]:
    if METADATA_KEY in graph.metadata and noted_manifest(graph) is None:
        yield METADATA_KEY, "the metadata have a broken manifest of `upcycle export`"


def _linears(function: Function) -> int:
    """Products with a weight, however they are written."""
    attention = {op.outputs for op in function.kv.contractions}
    return sum(
        op.type in ("linear", "conv", "matmul") and op.outputs not in attention
        for op in function.operations
    )


PACKAGE_LINTS = (
    Lint(
        "dropped-layers",
        "error",
        _dropped_layers,
        "export again: the converter has dropped part of the model",
    ),
    Lint(
        "broken-manifest",
        "warning",
        _broken_manifest,
        "export again, or leave the key to `upcycle export`: what it says of the model is ignored",
    ),
    Lint(
        "weights-2GB",
        "error",
        _larger_than(_MOST_WEIGHTS),
        "quantise it (--quantize) or cut it (--chunk-size): beyond 2 GB a program does not load on "
        "the Neural Engine",
    ),
    Lint(
        "weights-1GB",
        "warning",
        _larger_than(1_000_000_000, _MOST_WEIGHTS),
        "quantise it (--quantize) or cut it (--chunk-size): from 1.0 to 1.4 GB on, packages have "
        "run on the GPU without saying so",
    ),
    Lint(
        "unshared-weights",
        "warning",
        _unshared,
        "compress each function alike, then merge them, so that their weights are stored once",
    ),
    Lint(
        "palette-states",
        "note",
        _palettes_beside_states,
        "predict a few hundred times on your device: such a package of coremltools 9.0 crashed "
        "after 100 to 200 on the Neural Engine (apple/coremltools#2716); lut6, lut8 and int8 "
        "are in no such report",
    ),
    Lint(
        "several-masks",
        "note",
        _several_masks,
        "fill each in your own client; swift-transformers drives no package of this form: its "
        "stateful class sends one mask, `causalMask`, of which only the length means anything",
    ),
)

FUNCTION_LINTS = (*ATTENTION_LINTS, *STATE_LINTS, *NUMBER_LINTS, *SHAPE_LINTS)
_ORDER = ("error", "warning", "note")


def lint_graph(graph: Graph) -> list[Finding]:
    """Every broken rule, errors first; within a severity in the order of the tables."""
    return sorted(_findings(graph), key=lambda finding: _ORDER.index(finding.severity))


def _findings(graph: Graph) -> Iterator[Finding]:
    for rule in PACKAGE_LINTS:
        yield from _collected(rule, "", rule.check(graph))
    for name, function in graph.functions.items():
        for lint in FUNCTION_LINTS:
            yield from _collected(lint, name, lint.check(function))


def _collected(rule: Lint[Any], function: str, found: Iterable[Found]) -> Iterator[Finding]:
    """One finding for all the places of a rule."""
    places = list(found)
    if places:
        names = tuple(name for name, _ in places)
        yield Finding(rule.name, rule.severity, function, names, places[0][1], rule.fix)
