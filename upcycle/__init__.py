"""Turn a multi-head-attention checkpoint into grouped-query or multi-query attention.

Importing this package loads nothing heavy: each public name is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from upcycle.errors import UpcycleError
from upcycle.version import __version__

if TYPE_CHECKING:
    from upcycle.conversion.convert import convert as convert
    from upcycle.conversion.verify import verify as verify
    from upcycle.evaluation.compare import evaluate as evaluate
    from upcycle.export.coreml import export_coreml as export_coreml
    from upcycle.kvcache.counting import kv_cache_bytes as kv_cache_bytes
    from upcycle.options.convert import ConvertOptions as ConvertOptions
    from upcycle.options.evaluate import EvaluateOptions as EvaluateOptions
    from upcycle.options.export import ExportOptions as ExportOptions
    from upcycle.options.train import TrainOptions as TrainOptions
    from upcycle.planning import plan as plan

_HOMES = {
    "ConvertOptions": "upcycle.options.convert",
    "EvaluateOptions": "upcycle.options.evaluate",
    "ExportOptions": "upcycle.options.export",
    "TrainOptions": "upcycle.options.train",
    "convert": "upcycle.conversion.convert",
    "evaluate": "upcycle.evaluation.compare",
    "export_coreml": "upcycle.export.coreml",
    "kv_cache_bytes": "upcycle.kvcache.counting",
    "plan": "upcycle.planning",
    "verify": "upcycle.conversion.verify",
}

__all__ = ["UpcycleError", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'upcycle' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
