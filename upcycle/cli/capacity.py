"""`upcycle capacity`: how many requests fit on the GPUs, for each number of KV heads."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from upcycle.byte_sizes import parse_bytes
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checkpoint.staging import check_place
from upcycle.cli.arguments import BatchedTokens, HtmlFile, KvDtype
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import UpcycleError
from upcycle.kvcache.cache_dtype import asked_dtype
from upcycle.kvcache.capacity import Fit, fit_requests, parse_lengths
from upcycle.kvcache.deployment import BLOCK, Deployment, default_batched_tokens, serving_line
from upcycle.kvcache.devices import Device, device_named, devices
from upcycle.kvcache.layout import cache_layout, config_of
from upcycle.kvcache.recommendation import recommend
from upcycle.kvcache.weights import Weights, bytes_by_dtype, weights_of
from upcycle.report.capacity_page import (
    Capacity,
    milliseconds,
    name_of,
    window_lines,
    write_capacity_page,
)


@command(
    "capacity",
    epilog="Example: upcycle capacity config.json --weights 140GB --reserve 20GB "
    "--gpu-memory 80GB --gpus 4 --context 8192",
)
def capacity_command(
    console: Console,
    source: Annotated[
        str, typer.Argument(metavar="SRC|config.json", help="Folder, Hub id or bare config.")
    ],
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU, such as 80GiB, 80GB or plain bytes.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A named device, for its memory and its time for a decode step."),
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    tp: Annotated[
        int | None, typer.Option(help="GPUs that share one copy of the model. [default: all]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens that a request may grow to. [default: the model's longest]"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="How long requests are: 512:70,8192:30 (tokens:weight), or a file with one "
            "length per line. [default: all as long as the context]"
        ),
    ] = None,
    kv_dtype: KvDtype = "bf16",
    block: Annotated[int, typer.Option(help="Tokens per cache block.")] = BLOCK,
    batched_tokens: BatchedTokens = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights of one copy, the same for every number of KV heads. "
            "[default: from the safetensors headers, less what a conversion saves]"
        ),
    ] = None,
    reserve: Annotated[
        str, typer.Option(help="Memory for activations and runtime, summed over all GPUs.")
    ] = "0",
    utilization: Annotated[
        float, typer.Option(help="The fraction of GPU memory that may be used.")
    ] = 1.0,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Requests to decode together, which the recommendation must then hold. "
            "[default: 1 for read/step, no target for the recommendation]"
        ),
    ] = None,
    html: HtmlFile = None,
) -> Outcome:
    """Count how many requests fit with each number of KV heads, before any GPU is paid for.

    A layer with a sliding window holds its window plus one step of prefill, and a model with a
    latent holds its latent.
    """
    if html is not None:
        check_place(html, [Path(source)])
    config, model_weights, by_dtype = _model(source, weights)
    layout = cache_layout(config)
    device = None if gpu is None else device_named(gpu)
    table = {} if lengths is None else parse_lengths(lengths)
    memory = _memory(gpu_memory, device)
    if batched_tokens is None:
        batched_tokens = default_batched_tokens(memory, "" if device is None else device.name)
    deployment = Deployment(
        gpu_memory=memory,
        context=_longest_context(config, table) if context is None else context,
        gpus=gpus,
        tensor_parallel=tp,
        kv_dtype=asked_dtype("bf16" if kv_dtype is None else kv_dtype, lambda: config).name,
        block=block,
        reserve=parse_bytes(reserve, where="--reserve"),
        utilization=utilization,
        lengths=table,
        batched_tokens=batched_tokens,
    )
    fits = fit_requests(layout, model_weights, deployment, batch=1 if batch is None else batch)
    capacity = Capacity(
        source=source,
        layout=layout,
        weight_bytes_by_dtype=by_dtype,
        batch=1 if batch is None else batch,
        deployment=deployment,
        fits=fits,
        devices=devices() if device is None else (device,),
        recommendation=recommend(layout, deployment, fits, batch=batch),
    )
    if html is not None:
        write_capacity_page(capacity, html)
    _show(console, capacity, device)
    return Outcome(capacity.to_dict())


def _model(source: str, weights: str | None) -> tuple[Mapping[str, Any], Weights, dict[str, int]]:
    """The config and the weights, from the option or else from the headers, also by dtype."""
    if weights is not None:
        return config_of(source), Weights(parse_bytes(weights, where="--weights")), {}
    if os.path.isfile(source):
        raise UpcycleError(
            f"{Path(source).name} alone does not say how large the weights are",
            where=source,
            fix="give --weights, such as --weights 13.5GB, or name the folder with the weights",
        )
    checkpoint = Checkpoint.describe(source)
    return checkpoint.config, weights_of(checkpoint), bytes_by_dtype(checkpoint)


def _memory(gpu_memory: str | None, device: Device | None) -> int:
    if gpu_memory is not None:
        return parse_bytes(gpu_memory, where="--gpu-memory")
    if device is not None:
        return device.memory
    raise UpcycleError(
        "the memory of a GPU is not known",
        where="--gpu-memory",
        fix="give --gpu-memory 80GiB, or name a device with --gpu: "
        + ", ".join(known.name for known in devices()),
    )


def _longest_context(config: Mapping[str, Any], lengths: Mapping[int, int]) -> int:
    if lengths:
        return max(lengths)
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        raise UpcycleError(
            "the model's longest context is not known",
            where=f"{CONFIG_FILE}, max_position_embeddings",
            fix="give --context",
        )
    return longest


def _show(console: Console, capacity: Capacity, device: Device | None) -> None:
    fits, deployment = capacity.fits, capacity.deployment
    lengths = f"{len(deployment.lengths)} lengths up to " if deployment.lengths else "requests of "
    console.print(
        f"{deployment.gpus} x {format_bytes(deployment.gpu_memory)}, "
        f"tensor parallel {deployment.gpus_per_copy}, {deployment.kv_dtype} cache in blocks of "
        f"{deployment.block}, {lengths}{deployment.context:,} tokens"
    )
    for line in _facts(capacity):
        console.print(line)
    console.print()
    timed = [] if device is None else [device]
    console.table(
        (
            *("KV heads", "kind", "weights", "KV B/token", "cache tokens", "requests", "read/step"),
            *(f"step on {known.name}" for known in timed),
        ),
        [
            (
                _label(fit, index == capacity.now),
                fit.kind,
                format_bytes(fit.weight_bytes),
                f"{fit.kv_bytes_per_token:,}",
                f"{fit.cache_tokens:,}",
                f"{fit.requests:,} ({fit.concurrency:,.1f})",
                format_bytes(fit.decode_step_bytes),
                *(milliseconds(capacity.step_seconds(known, fit)) for known in timed),
            )
            for index, fit in enumerate(fits)
        ],
    )
    console.print()
    console.print(f"read/step: weights and cache of a decode step with batch {capacity.batch}")
    if device is not None:
        console.print(
            f"step: reading that at {device.bandwidth / 1e9:,.0f} GB/s on each GPU, a bound that "
            f"no kernel beats ({device.source})"
        )
    for fit in fits:
        if fit.warning:
            console.print(f"warning: {fit.warning}")
    useful = ", ".join(name_of(fit) for fit in fits if fit.stored_once) or "none"
    console.print(f"stored once on tensor parallel {deployment.gpus_per_copy}: {useful}")
    layout, best = capacity.layout, capacity.recommendation
    for kv_heads in dict.fromkeys((layout.now.kv_heads, best.kv_heads)):
        if kv_heads is not None:
            line = serving_line(layout.shape.num_attention_heads, kv_heads)
            console.print(f"g={kv_heads} {line}")
    chosen = "" if best.kv_heads is None else f"recommended: g={best.kv_heads} "
    console.print(f"{chosen}({best.reason})" if chosen else best.reason)


def _label(fit: Fit, now: bool) -> str:
    name = "latent" if fit.kv_heads is None else str(fit.kv_heads)
    return f"{name} (now)" if now else name


def _facts(capacity: Capacity) -> list[str]:
    """What shapes the numbers of this model beside its heads."""
    lines = []
    wasted = capacity.deployment.tokens_wasted
    if wasted:
        lines.append(f"rounding to whole blocks wastes {wasted:,.1f} tokens a request")
    lines += window_lines(capacity)
    if capacity.layout.state_elements:
        lines.append(
            f"layers without attention keep {capacity.layout.state_elements:,} elements a request, "
            "however long it is and however many tokens a step has"
        )
    if capacity.weight_bytes_by_dtype:
        parts = capacity.weight_bytes_by_dtype.items()
        lines.append("weights: " + ", ".join(f"{name} {format_bytes(n)}" for name, n in parts))
    if capacity.deployment.lengths:
        worst = [f"{fit.requests_at_context:,} with {name_of(fit)}" for fit in capacity.fits]
        lines.append(f"requests: on average; if all grow to the context, {', '.join(worst)}")
    return lines
