"""`upcycle export`: make a Core ML package."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Calibration, Overwrite, Source
from upcycle.cli.console import Console, Outcome, command, format_bytes


@command("export", epilog="Example: upcycle export out model.mlpackage --context 512")
def export_command(
    console: Console,
    source: Source,
    output: Annotated[
        Path, typer.Argument(metavar="OUT.mlpackage", help="The Core ML package to make.")
    ],
    context: Annotated[
        int, typer.Option("--context", help="Positions that the KV cache holds, a multiple of 32.")
    ] = 512,
    prefill: Annotated[
        int | None,
        typer.Option("--prefill", help="Tokens per call of a second function, such as 64."),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            "--attention",
            help="qfold never copies K and V; repeat-kv copies them to all query heads.",
        ),
    ] = "qfold",
    kv_cache: Annotated[
        str,
        typer.Option(
            "--kv-cache",
            help="state keeps K and V in Core ML states; read-only has them in and out.",
        ),
    ] = "state",
    conv: Annotated[
        bool, typer.Option("--conv", help="Make linear layers 1x1 convolutions.")
    ] = False,
    split_head: Annotated[
        int, typer.Option("--split-head", help="Parts that the output head is split into.")
    ] = 1,
    argmax: Annotated[
        bool, typer.Option("--argmax", help="Give the likeliest next token beside the logits.")
    ] = False,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            help="int8, int4, lut4, lut6, lut8, mixed, top8, top12, or a YAML file; else fp16.",
        ),
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Store a tied output matrix apart from the embedding.")
    ] = False,
    calibration: Calibration = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Export SRC as a Core ML program (iOS 18) that decodes one token per call."""
    from upcycle.export.coreml import export_coreml

    with console.progress() as watch:
        result = export_coreml(
            source,
            output,
            context=context,
            prefill=prefill,
            attention=attention,
            kv_cache=kv_cache,
            conv=conv,
            split_head=split_head,
            argmax=argmax,
            quantize=quantize,
            untie=untie,
            calibration=calibration or ["builtin"],
            overwrite=overwrite,
            watch=watch,
        )
    function = result.function
    kv_tiles = [tile for tile in function.tiles if tile.of_kv]
    kv_tile_bytes = sum(tile.nbytes for tile in kv_tiles)
    shape = result.shape
    head_dims = shape.head_dim + shape.value_head_dim
    cache = shape.num_layers * shape.num_key_value_heads * head_dims * context * 2  # fp16
    console.print(
        f"{output}: {function.histogram.total():,} operations, {len(kv_tiles)} copies of K and V "
        f"({format_bytes(kv_tile_bytes)}), {format_bytes(cache)} of KV cache for {context} tokens"
    )
    if prefill is not None:
        console.print(f"the function `prefill` takes {prefill} tokens per call")
    console.print(f"see `upcycle graph {output}` for its operations and bytes per token")
    return Outcome(
        {
            "output": str(output),
            **asdict(result.options),
            "decoder": asdict(shape),
            "operations": function.histogram.total(),
            "kv_tiles": len(kv_tiles),
            "kv_tile_bytes": kv_tile_bytes,
            "kv_cache_bytes": cache,
            "manifest": result.manifest,
        }
    )
