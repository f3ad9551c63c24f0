"""The tables and the page of `upcycle sweep`."""

from pathlib import Path
from typing import Any

from upcycle.evaluation.drift import Difference, Drift, DriftSweep
from upcycle.kvcache.cache_dtype import cache_dtype
from upcycle.kvcache.layout import Entry
from upcycle.pages.formatting import NBSP, binary_bytes, factor, integer
from upcycle.pages.page import write_page

DRIFT_NOTE = (
    "drift, not quality loss: it says how far outputs move before any training, not how much "
    "worse they are; `upcycle eval` measures that"
)
_COLUMNS = (
    "KV heads", "kind", "KV B/token", "weights", "K/V parameters", "K/V MACs/token", "core MACs",
    "logits: max", "max relative", "RMS relative",
)  # fmt: skip


def write_sweep_page(sweep: DriftSweep, path: Path, *, source: str, kv_dtype: str) -> None:
    """Write the page of a sweep.

    Args:
        sweep: what was measured.
        path: the file.
        source: how the user called the model.
        kv_dtype: storage type of the cache, a name that `cache_dtype` knows.

    Raises:
        OutputError: the file cannot be written.
    """
    write_page(
        path,
        "sweep.html.j2",
        sweep=sweep,
        source=source,
        kv_dtype=kv_dtype,
        note=DRIFT_NOTE,
        identical=identical_line(sweep),
        overview=overview_rows(sweep, kv_dtype),
        layers=layer_rows(sweep),
        choices=[_slide(sweep, choice, kv_dtype) for choice in sweep.choices],
        num_layers=len(sweep.choices[0].layers),
    )


def overview_rows(sweep: DriftSweep, kv_dtype: str) -> list[list[str]]:
    """Counts beside drift, one row for each number of KV heads after the header."""
    rows = [list(_COLUMNS)]
    for choice in sweep.choices:
        counts, logits = choice.counts, choice.logits
        own = counts.kv_heads == sweep.num_key_value_heads
        rows.append(
            [
                f"{counts.kv_heads} (now)" if own else str(counts.kv_heads),
                counts.kind,
                integer(_token_bytes(sweep, choice, kv_dtype)),
                binary_bytes(choice.weight_bytes),
                integer(counts.projection_parameters),
                integer(counts.projection_macs),
                integer(counts.core_macs),
                _largest(logits),
                _share(logits.max_relative, logits.identical),
                _share(logits.rms_relative, logits.identical),
            ]
        )
    return rows


def layer_rows(sweep: DriftSweep) -> list[list[str]]:
    """The drift after each layer, one column for each number of KV heads."""
    rows = [["layer", *(f"g={choice.counts.kv_heads}" for choice in sweep.choices)]]
    for layer, found in enumerate(zip(*(choice.layers for choice in sweep.choices), strict=True)):
        rows.append([str(layer), *(_share(each.rms_relative, each.identical) for each in found)])
    return rows


def identical_line(sweep: DriftSweep) -> str:
    """Which numbers of KV heads change nothing at all; empty where none."""
    same = [
        f"g={choice.counts.kv_heads}"
        for choice in sweep.choices
        if all(each.identical for each in (choice.logits, *choice.layers))
    ]
    return f"{', '.join(same)}: not one bit differs in any layer or logit" if same else ""


def _slide(sweep: DriftSweep, choice: Drift, kv_dtype: str) -> dict[str, Any]:
    """What the slider shows of one number of KV heads."""
    counts, logits = choice.counts, choice.logits
    now = [
        _token_bytes(sweep, other, kv_dtype)
        for other in sweep.choices
        if other.counts.kv_heads == sweep.num_key_value_heads
    ]
    token = _token_bytes(sweep, choice, kv_dtype)
    return {
        "name": f"g={counts.kv_heads}",
        "kind": counts.kind,
        "cache": binary_bytes(token),
        "ratio": f"{factor(token / now[0])} of the source" if now else "",
        "drift": _share(logits.rms_relative, logits.identical),
        "largest": _largest(logits),
        "parameters": integer(counts.projection_parameters),
        "layers": [each.rms_relative for each in choice.layers],
    }


def _token_bytes(sweep: DriftSweep, choice: Drift, kv_dtype: str) -> int:
    counts = choice.counts
    heads = counts.kv_heads or 1  # a latent is one
    entry = Entry(counts.kind, counts.kv_heads, heads, sweep.head_dim, sweep.value_head_dim)
    return cache_dtype(kv_dtype).bytes_per_head(entry) * heads * sweep.attention_layers


def _largest(moved: Difference) -> str:
    return "0 (same bits)" if moved.identical else f"{moved.max_absolute:.3g}"


def _share(value: float, identical: bool) -> str:
    return "0" if identical else f"{100 * value:.3g}{NBSP}%"
