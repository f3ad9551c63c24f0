"""What is reported of devices that no check on this machine can see, as notes beside an export."""

from upcycle.export.coreml import ExportResult
from upcycle.options.export import STATE, ExportOptions
from upcycle.program.lints.package import lint_graph

# Lints whose findings an export tells at once; `graph` shows all of them.
_TOLD = ("head-size", "palette-states", "state-size")
_STEADY_PREFILL = 16  # tokens per call


def device_notes(result: ExportResult, *, core_ai: bool) -> list[str]:
    """What an export's owner should try on a device before relying on it.

    Args:
        result: of the export.
        core_ai: whether it is a Core AI asset.
    """
    if core_ai:
        return _core_ai_notes(result.options)
    first: dict[str, str] = {}
    for found in lint_graph(result.graph):
        if found.lint in _TOLD:
            first.setdefault(found.lint, f"{found.lint}: {found.what}; {found.fix}")
    return list(first.values())


def _core_ai_notes(options: ExportOptions) -> list[str]:
    prefill = options.prefill
    if prefill is None or prefill <= _STEADY_PREFILL or options.kv_cache != STATE:
        return []
    note = (
        f"prefill of {prefill} tokens per call into states: on macOS such calls gave other "
        f"tokens in every process from {_STEADY_PREFILL + 1} tokens on "
        f"(apple/coreai-models#84); --prefill {_STEADY_PREFILL} did not, nor does "
        "--kv-cache read-only write into states"
    )
    return [note]
