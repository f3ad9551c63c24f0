"""`upcycle capacity`: how many requests fit on the GPUs, for each number of KV heads."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import UpcycleError
from upcycle.families import shape_of
from upcycle.kvcache.capacity import Deployment, Fit, fit_requests
from upcycle.kvcache.counting import config_of
from upcycle.kvcache.recommendation import Recommendation, recommend
from upcycle.kvcache.sizes import parse_bytes
from upcycle.kvcache.weights import Weights, weights_of


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
        str, typer.Option(help="Memory of each GPU, such as 80GiB, 80GB or plain bytes.")
    ],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    tp: Annotated[
        int | None, typer.Option(help="GPUs that share one copy of the model. [default: all]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of every request. [default: the model's longest]"),
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp8, int8 or int4.")] = "bf16",
    block: Annotated[int, typer.Option(help="Tokens of one cache block.")] = 16,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights of one copy, the same for every number of KV heads. "
            "[default: from the safetensors headers, less what a conversion saves]"
        ),
    ] = None,
    reserve: Annotated[
        str, typer.Option(help="For activations and runtime, on all GPUs together.")
    ] = "0",
    utilization: Annotated[
        float, typer.Option(help="Part of the GPU memory that may be used.")
    ] = 1.0,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Requests to decode together, which the recommendation must then hold. "
            "[default: 1 for read/step, no target for the recommendation]"
        ),
    ] = None,
) -> Outcome:
    """Count how many requests fit with each number of KV heads, before any GPU is paid for.

    Every request is taken to run to its full context, and every layer to cache all of it.
    """
    config, model_weights = _model(source, weights)
    shape = shape_of(config)
    deployment = Deployment(
        gpu_memory=parse_bytes(gpu_memory, where="--gpu-memory"),
        context=_longest_context(config) if context is None else context,
        gpus=gpus,
        tensor_parallel=tp,
        kv_dtype=kv_dtype,
        block=block,
        reserve=parse_bytes(reserve, where="--reserve"),
        utilization=utilization,
    )
    fits = fit_requests(shape, model_weights, deployment, batch=1 if batch is None else batch)
    recommendation = recommend(shape, deployment, fits, batch=batch)
    _show(console, deployment, fits, recommendation, shape.num_key_value_heads, batch)
    return Outcome(
        {
            "source": source,
            "num_key_value_heads": shape.num_key_value_heads,
            "batch": 1 if batch is None else batch,
            "deployment": asdict(deployment),
            "fits": [asdict(fit) for fit in fits],
            "recommendation": asdict(recommendation),
        }
    )


def _model(source: str, weights: str | None) -> tuple[Mapping[str, Any], Weights]:
    """The config and the weights, from the option or else from the headers."""
    if weights is not None:
        return config_of(source), Weights(parse_bytes(weights, where="--weights"))
    if Path(source).name == CONFIG_FILE and Path(source).is_file():
        raise UpcycleError(
            f"{CONFIG_FILE} alone does not say how large the weights are",
            where=source,
            fix="give --weights, such as --weights 13.5GB, or name the folder with the weights",
        )
    checkpoint = Checkpoint.open(source)
    return checkpoint.config, weights_of(checkpoint)


def _longest_context(config: Mapping[str, Any]) -> int:
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        raise UpcycleError(
            "the model's longest context is not known",
            where=f"{CONFIG_FILE}, max_position_embeddings",
            fix="give --context",
        )
    return longest


def _show(
    console: Console,
    deployment: Deployment,
    fits: tuple[Fit, ...],
    recommendation: Recommendation,
    kv_heads_now: int,
    batch: int | None,
) -> None:
    console.print(
        f"{deployment.gpus} x {format_bytes(deployment.gpu_memory)}, "
        f"tensor parallel {deployment.gpus_per_copy}, {deployment.kv_dtype} cache in blocks of "
        f"{deployment.block}, requests of {deployment.context:,} tokens"
    )
    wasted = deployment.blocks_per_request * deployment.block - deployment.context
    if wasted:
        console.print(f"rounding to whole blocks wastes {wasted:,} tokens a request")
    console.print()
    console.table(
        ("KV heads", "kind", "weights", "KV B/token", "cache tokens", "requests", "read/step"),
        [
            (
                f"{fit.kv_heads} (now)" if fit.kv_heads == kv_heads_now else str(fit.kv_heads),
                fit.kind,
                format_bytes(fit.weight_bytes),
                f"{fit.kv_bytes_per_token:,}",
                f"{fit.cache_tokens:,}",
                f"{fit.requests:,} ({fit.concurrency:,.1f})",
                format_bytes(fit.decode_step_bytes),
            )
            for fit in fits
        ],
    )
    console.print()
    console.print(f"read/step: weights and cache of a decode step with batch {batch or 1}")
    for fit in fits:
        if fit.warning:
            console.print(f"warning: {fit.warning}")
    if recommendation.kv_heads is None:
        console.print(recommendation.reason)
    else:
        console.print(f"recommended: g={recommendation.kv_heads} ({recommendation.reason})")
