"""The page of `upcycle capacity`: a table, and one number of KV heads at a time by a slider."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.kvcache.deployment import BATCHED_TOKENS, BATCHED_TOKENS_LARGE
from upcycle.kvcache.parallel import TensorParallel
from upcycle.pages.formatting import binary_bytes, factor, integer
from upcycle.pages.page import write_page


def write_capacity_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page for what `upcycle capacity --json` prints.

    Raises:
        OutputError: the file cannot be written.
    """
    fits = document["fits"]
    now = document["now"]
    write_page(
        path,
        "capacity.html.j2",
        document=document,
        deployment=document["deployment"],
        fits=fits,
        now=now,
        windows=window_lines(document),
        choices=[_choice(document, index) for index in range(len(fits))],
    )


def window_lines(document: Mapping[str, Any]) -> list[str]:
    """What a request takes in layers with a window, and where that comes from; empty without any.

    Args:
        document: what `upcycle capacity --json` prints.
    """
    of, step = document["num_layers"], document["deployment"]["batched_tokens"]
    lines = []
    for window, layers in document["layers_by_window"].items():
        if window == "full":
            continue
        if document["chunked"]:
            lines.append(
                f"{layers} of {of} layers attend in chunks of {int(window):,} tokens: a request "
                f"takes the smaller of its length and {int(window):,} + {step:,} tokens there"
            )
        else:
            lines.append(
                f"{layers} of {of} layers see a window of {int(window):,} tokens: a request takes "
                f"the smaller of its length and {int(window) - 1:,} + {step:,} tokens there, and a "
                f"block; transformers caches the latest {int(window) - 1:,} tokens alone"
            )
    if not lines:
        return []
    switch = (
        ", which counts chunks so with VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1 and "
        "else takes the whole length"
        if document["chunked"]
        else ""
    )
    source = (
        f"{step:,}: tokens that the server computes in one step (--batched-tokens); vLLM's default "
        f"for a server is {BATCHED_TOKENS_LARGE:,} on GPUs of 70 GiB or more but the A100, and "
        f"{BATCHED_TOKENS:,} on others (EngineArgs.get_batch_defaults){switch}"
    )
    return [*lines, source]


def name_of(fit: Mapping[str, Any]) -> str:
    """How a choice is called: its number of KV heads, or MLA."""
    return fit["kind"] if fit["kv_heads"] is None else f"g={fit['kv_heads']}"


def _choice(document: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What the slider shows of one choice; all text is made here, so that the script has none."""
    fit, reference = document["fits"][index], document["fits"][document["now"]]
    deployment, batch = document["deployment"], document["batch"]
    gpus = deployment["gpus"]
    copies = gpus // (deployment["tensor_parallel"] or gpus)
    memory = deployment["gpu_memory"] * gpus
    weights = min(memory, fit["weight_bytes"] * copies)
    asked = min(batch, fit["requests"])
    used = min(memory - weights, asked * fit["mean_request_bytes"])
    return {
        "name": name_of(fit),
        "kind": fit["kind"],
        "cache": binary_bytes(fit["kv_bytes_per_token"]),
        "ratio": factor(fit["kv_bytes_per_token"] / reference["kv_bytes_per_token"]),
        "request": binary_bytes(fit["request_bytes"]),
        "requests": integer(fit["requests"]),
        "weights": binary_bytes(fit["weight_bytes"] * copies),
        "read": binary_bytes(fit["decode_step_bytes"]),
        "warning": fit["warning"] or "",
        "sizes": str(TensorParallel(**fit["tensor_parallel"])),
        "bars": {"weights": weights / memory, "cache": used / memory},
        "steps": [milliseconds(device["step_seconds"][index]) for device in document["devices"]],
    }


def milliseconds(seconds: float) -> str:
    """A step time with three digits: "8.61 ms"."""
    return f"{seconds * 1000:.3g} ms"
