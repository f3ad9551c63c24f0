"""What `upcycle capacity` finds, and its page: a table, and one number of KV heads by a slider."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upcycle.kvcache.capacity import Fit
from upcycle.kvcache.deployment import BATCHED_TOKENS, BATCHED_TOKENS_LARGE, Deployment
from upcycle.kvcache.devices import Device
from upcycle.kvcache.layout import CacheLayout
from upcycle.kvcache.recommendation import Recommendation
from upcycle.pages.formatting import binary_bytes, factor, integer
from upcycle.pages.page import write_page


@dataclass(frozen=True)
class Capacity:
    """How many requests fit, for each number of KV heads.

    Attributes:
        source: how the user called the model.
        layout: what its layers cache.
        weight_bytes_by_dtype: of its weights, where they were read.
        batch: requests that are decoded together.
        deployment: where it is served.
        fits: every choice, most heads first.
        devices: those that a decode step is timed on.
        recommendation: which choice to take.
    """

    source: str
    layout: CacheLayout
    weight_bytes_by_dtype: dict[str, int]
    batch: int
    deployment: Deployment
    fits: tuple[Fit, ...]
    devices: tuple[Device, ...]
    recommendation: Recommendation

    @property
    def now(self) -> int:
        """The index of the model as it is."""
        return self.layout.entries.index(self.layout.now)

    def step_seconds(self, device: Device, fit: Fit) -> float:
        """The time of a decode step if memory is the limit."""
        return device.step_seconds(fit.decode_step_bytes, self.deployment.gpus)

    def to_dict(self) -> dict[str, Any]:
        """What `upcycle capacity --json` prints."""
        layout = self.layout
        return {
            "source": self.source,
            "num_attention_heads": layout.shape.num_attention_heads,
            "num_key_value_heads": layout.now.kv_heads,
            "now": self.now,
            "num_layers": layout.shape.num_layers,
            "layers_by_window": {
                "full" if window is None else str(window): count
                for window, count in layout.layers_by_window.items()
            },
            "chunked": layout.chunked,
            "state_elements": layout.state_elements,
            "weight_bytes_by_dtype": self.weight_bytes_by_dtype,
            "batch": self.batch,
            "deployment": {
                **asdict(self.deployment),
                "tokens_wasted": self.deployment.tokens_wasted,
            },
            "fits": [asdict(fit) for fit in self.fits],
            "without_waste": [fit.kv_heads for fit in self.fits if fit.stored_once],
            "devices": [
                asdict(device)
                | {"step_seconds": [self.step_seconds(device, fit) for fit in self.fits]}
                for device in self.devices
            ],
            "recommendation": asdict(self.recommendation),
        }


def write_capacity_page(capacity: Capacity, path: Path) -> None:
    """Write the page.

    Raises:
        OutputError: the file cannot be written.
    """
    write_page(
        path,
        "capacity.html.j2",
        capacity=capacity,
        windows=window_lines(capacity),
        choices=[_choice(capacity, fit) for fit in capacity.fits],
    )


def window_lines(capacity: Capacity) -> list[str]:
    """What a request takes in layers with a window, and where that comes from."""
    layout, step = capacity.layout, capacity.deployment.tokens_per_step
    of = layout.shape.num_layers
    lines = []
    for window, layers in layout.layers_by_window.items():
        if window is None:
            continue
        if layout.chunked:
            lines.append(
                f"{layers} of {of} layers attend in chunks of {window:,} tokens: a request "
                f"takes the smaller of its length and {window:,} + {step:,} tokens there"
            )
        else:
            lines.append(
                f"{layers} of {of} layers see a window of {window:,} tokens: a request takes "
                f"the smaller of its length and {window - 1:,} + {step:,} tokens there, and a "
                f"block; transformers caches the latest {window - 1:,} tokens alone"
            )
    if not lines:
        return []
    switch = (
        ", which counts chunks so with VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1 and "
        "else takes the whole length"
        if layout.chunked
        else ""
    )
    source = (
        f"{step:,}: tokens that the server computes in one step (--batched-tokens); vLLM's default "
        f"for a server is {BATCHED_TOKENS_LARGE:,} on GPUs of 70 GiB or more but the A100, and "
        f"{BATCHED_TOKENS:,} on others (EngineArgs.get_batch_defaults){switch}"
    )
    return [*lines, source]


def name_of(fit: Fit) -> str:
    """How a choice is called: its number of KV heads, or MLA."""
    return fit.kind if fit.kv_heads is None else f"g={fit.kv_heads}"


def _choice(capacity: Capacity, fit: Fit) -> dict[str, Any]:
    """What the slider shows of one choice; all text is made here, so that the script has none."""
    reference, deployment = capacity.fits[capacity.now], capacity.deployment
    memory = deployment.gpu_memory * deployment.gpus
    weights = min(memory, fit.weight_bytes * deployment.copies)
    used = min(memory - weights, min(capacity.batch, fit.requests) * fit.mean_request_bytes)
    return {
        "name": name_of(fit),
        "kind": fit.kind,
        "cache": binary_bytes(fit.kv_bytes_per_token),
        "ratio": factor(fit.kv_bytes_per_token / reference.kv_bytes_per_token),
        "request": binary_bytes(fit.request_bytes),
        "requests": integer(fit.requests),
        "weights": binary_bytes(fit.weight_bytes * deployment.copies),
        "read": binary_bytes(fit.decode_step_bytes),
        "warning": fit.warning or "",
        "sizes": str(fit.tensor_parallel),
        "bars": {"weights": weights / memory, "cache": used / memory},
        "steps": [milliseconds(capacity.step_seconds(each, fit)) for each in capacity.devices],
    }


def milliseconds(seconds: float) -> str:
    """A step time with three digits: "8.61 ms"."""
    return f"{seconds * 1000:.3g} ms"
