"""The tables and the page of `upcycle sweep`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.kvcache.cache_dtype import cache_dtype
from upcycle.kvcache.layout import Entry
from upcycle.pages.formatting import NBSP, binary_bytes, factor, integer
from upcycle.pages.page import write_page

DRIFT_NOTE = (
    "drift, not quality loss: it says how far outputs move before any training, not how much "
    "worse they are; `upcycle eval` measures that"
)


def write_sweep_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page for what `upcycle sweep --json` prints.

    Raises:
        OutputError: the file cannot be written.
    """
    write_page(
        path,
        "sweep.html.j2",
        document=document,
        note=DRIFT_NOTE,
        identical=identical_line(document),
        overview=overview_rows(document),
        layers=layer_rows(document),
        choices=[_slide(document, index) for index in range(len(document["choices"]))],
        num_layers=len(document["choices"][0]["layers"]),
    )


def overview_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Counts beside drift, one row for each number of KV heads after the header."""
    rows = [
        [
            "KV heads",
            "kind",
            "KV B/token",
            "weights",
            "K/V parameters",
            "K/V MACs/token",
            "core MACs",
            "logits: max",
            "max relative",
            "RMS relative",
        ]
    ]
    for choice in document["choices"]:
        counts, logits = choice["counts"], choice["logits"]
        own = counts["kv_heads"] == document["num_key_value_heads"]
        rows.append(
            [
                f"{counts['kv_heads']} (now)" if own else str(counts["kv_heads"]),
                counts["kind"],
                integer(_token_bytes(document, choice)),
                binary_bytes(choice["weight_bytes"]),
                integer(counts["projection_parameters"]),
                integer(counts["projection_macs"]),
                integer(counts["core_macs"]),
                _drift(logits["max_absolute"], logits["identical"]),
                _share(logits["max_relative"], logits["identical"]),
                _share(logits["rms_relative"], logits["identical"]),
            ]
        )
    return rows


def layer_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """The drift after each layer, one column for each number of KV heads."""
    choices = document["choices"]
    rows = [["layer", *(f"g={choice['counts']['kv_heads']}" for choice in choices)]]
    for layer in range(len(choices[0]["layers"])):
        found = [choice["layers"][layer] for choice in choices]
        shares = [_share(each["rms_relative"], each["identical"]) for each in found]
        rows.append([str(layer), *shares])
    return rows


def identical_line(document: Mapping[str, Any]) -> str:
    """Which numbers of KV heads change nothing at all; empty where none."""
    same = [
        f"g={choice['counts']['kv_heads']}"
        for choice in document["choices"]
        if choice["logits"]["identical"] and all(each["identical"] for each in choice["layers"])
    ]
    return f"{', '.join(same)}: not one bit differs in any layer or logit" if same else ""


def _slide(document: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What the slider shows of one number of KV heads."""
    choice = document["choices"][index]
    counts, logits = choice["counts"], choice["logits"]
    now = next(
        (
            _token_bytes(document, other)
            for other in document["choices"]
            if other["counts"]["kv_heads"] == document["num_key_value_heads"]
        ),
        None,
    )
    token = _token_bytes(document, choice)
    return {
        "name": f"g={counts['kv_heads']}",
        "kind": counts["kind"],
        "cache": binary_bytes(token),
        "ratio": "" if now is None else f"{factor(token / now)} of the source",
        "drift": _share(logits["rms_relative"], logits["identical"]),
        "largest": _drift(logits["max_absolute"], logits["identical"]),
        "parameters": integer(counts["projection_parameters"]),
        "layers": [each["rms_relative"] for each in choice["layers"]],
    }


def _token_bytes(document: Mapping[str, Any], choice: Mapping[str, Any]) -> int:
    entry = Entry(
        choice["counts"]["kind"],
        choice["counts"]["kv_heads"],
        choice["counts"]["kv_heads"],
        document["head_dim"],
        document["value_head_dim"],
    )
    per_head = cache_dtype(document["kv_dtype"]).bytes_per_head(entry)
    return per_head * entry.heads * int(document["attention_layers"])


def _drift(value: float, identical: bool) -> str:
    return "0 (same bits)" if identical else f"{value:.3g}"


def _share(value: float, identical: bool) -> str:
    return "0" if identical else f"{100 * value:.3g}{NBSP}%"
