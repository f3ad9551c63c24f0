"""`upcycle export`: make a Core ML package."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Overwrite, Source
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
    attention: Annotated[
        str,
        typer.Option(
            "--attention",
            help="qfold never copies K and V; repeat-kv copies them to all query heads.",
        ),
    ] = "qfold",
    overwrite: Overwrite = False,
) -> Outcome:
    """Export SRC as a Core ML program (iOS 18) that decodes one token per call."""
    from upcycle.export.coreml import export_coreml

    with console.progress() as watch:
        result = export_coreml(
            source, output, context=context, attention=attention, overwrite=overwrite, watch=watch
        )
    function = result.function
    kv_tiles = [tile for tile in function.tiles if tile.of_kv]
    kv_tile_bytes = sum(tile.nbytes for tile in kv_tiles)
    states = sum(state.nbytes for state in function.states.values())
    console.print(
        f"{output}: {function.histogram.total():,} operations, {len(kv_tiles)} copies of K and V "
        f"({format_bytes(kv_tile_bytes)}), {format_bytes(states)} of KV cache for {context} tokens"
    )
    console.print(f"see `upcycle graph {output}` for its operations and bytes per token")
    return Outcome(
        {
            "output": str(output),
            "context": context,
            "attention": attention,
            "decoder": asdict(result.shape),
            "operations": function.histogram.total(),
            "kv_tiles": len(kv_tiles),
            "kv_tile_bytes": kv_tile_bytes,
            "state_bytes": states,
            "manifest": result.manifest,
        }
    )
