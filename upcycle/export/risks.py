"""What is reported of devices that no check on this machine can see, as notes beside an export."""

import json
from collections.abc import Iterator

from upcycle.export.coreml import ExportResult
from upcycle.options.export import STATE
from upcycle.program.graph import METADATA_KEY, Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.signature import DECODE

# Lints whose findings an export tells at once; `graph` shows all of them.
_TOLD = ("head-size", "palette-states", "state-size")
_STEADY_PREFILL = 16  # tokens per call


def device_notes(result: ExportResult, *, core_ai: bool) -> list[str]:
    """What an export's owner should try on a device before relying on it.

    Args:
        result: of the export.
        core_ai: whether it is a Core AI asset.
    """
    return list(_core_ai_notes(result) if core_ai else _core_ml_notes(result))


def _core_ml_notes(result: ExportResult) -> Iterator[str]:
    graph = Graph(result.functions, {METADATA_KEY: json.dumps(result.manifest.document)}, DECODE)
    seen = set()
    for found in lint_graph(graph):
        if found.lint in _TOLD and found.lint not in seen:
            seen.add(found.lint)
            yield f"{found.lint}: {found.what}; {found.fix}"


def _core_ai_notes(result: ExportResult) -> Iterator[str]:
    prefill = result.options.prefill
    if prefill is not None and prefill > _STEADY_PREFILL and result.options.kv_cache == STATE:
        yield (
            f"prefill of {prefill} tokens per call into states: on macOS such calls gave other "
            f"tokens in every process from {_STEADY_PREFILL + 1} tokens on "
            f"(apple/coreai-models#84); --prefill {_STEADY_PREFILL} did not, nor does "
            "--kv-cache read-only write into states"
        )
