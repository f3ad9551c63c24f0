"""`upcycle export`: make a Core ML package."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upcycle.cli.arguments import Overwrite, Source
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import ExportError
from upcycle.options.export import DEFAULTS, ExportOptions

if TYPE_CHECKING:
    from upcycle.export.quantize.preparation import Prepared


@command("export", epilog="Example: upcycle export out model.mlpackage --context 512")
def export_command(
    console: Console,
    source: Source,
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="What to make: a Core ML package, .mlpackage; a Core AI asset, .aimodel; or with "
            "--chunk-size a folder.",
        ),
    ],
    options: ExportOptions = DEFAULTS,
    overwrite: Overwrite = False,
) -> Outcome:
    """Export SRC as a program of Core ML (iOS 18) or Core AI that decodes token by token."""
    from upcycle.export.coreai.exporting import SUFFIX, export_coreai
    from upcycle.export.coreml import export_coreml
    from upcycle.export.risks import device_notes

    if options.quantize is None and "calibration" in options.model_fields_set:
        raise ExportError(
            "there is nothing to calibrate without quantised weights",
            where="--calibration",
            fix="pass --quantize too, or omit --calibration",
        )
    export = export_coreai if output.suffix == SUFFIX else export_coreml
    with console.progress() as watch:
        result = export(source, output, options, overwrite=overwrite, watch=watch)
    function = result.function
    kv_tiles = [tile for tile in function.tiles if tile.of_kv]
    kv_tile_bytes = sum(tile.nbytes for tile in kv_tiles)
    shape = result.shape
    head_dims = shape.head_dim + shape.value_head_dim
    cache = shape.num_layers * shape.num_key_value_heads * head_dims * options.context * 2  # fp16
    console.print(
        f"{output}: {function.histogram.total():,} operations, {len(kv_tiles)} copies of K and V "
        f"({format_bytes(kv_tile_bytes)}), {format_bytes(cache)} of KV cache for "
        f"{options.context} tokens"
    )
    for chunk in result.manifest.result.chunks or ():
        _show_chunk(console, chunk.document)
    if options.prefill is not None:
        console.print(f"the function `prefill` takes {options.prefill} tokens per call")
    if result.quantization is not None:
        _show_quantization(console, result.quantization)
    notes = device_notes(result, core_ai=output.suffix == SUFFIX)
    for note in notes:
        console.print(f"note: {note}")
    if output.suffix != SUFFIX:
        console.print(f"see `upcycle graph {output}` for its operations and bytes per token")
    console.print(f"see `upcycle check-export {source} {output}` for what it computes")
    return Outcome(
        {
            "output": str(output),
            **options.noted(),
            "quantize": options.quantize,
            "decoder": shape.document,
            "operations": function.histogram.total(),
            "kv_tiles": len(kv_tiles),
            "kv_tile_bytes": kv_tile_bytes,
            "kv_cache_bytes": cache,
            "notes": notes,
            "manifest": result.manifest.document,
        }
    )


def _show_chunk(console: Console, chunk: dict[str, Any]) -> None:
    first = chunk["first_layer"]
    last = first + chunk["num_layers"] - 1
    console.print(
        f"{chunk['package']}: layers {first} to {last}, {format_bytes(chunk['weight_bytes'])} of "
        f"weights{', which is the whole model' if chunk['of'] == 1 else ''}"
    )


def _show_quantization(console: Console, prepared: "Prepared") -> None:
    roles = ", ".join(f"{role} {bits}" for role, bits in prepared.record()["roles"].items())
    console.print(f"weights: {roles}")
    found = prepared.sensitivity
    if found is not None:
        promoted = ", ".join(map(str, sorted(prepared.promoted)))
        console.print(f"layers with more bits, as the most sensitive: {promoted}")
        console.table(
            ["layer", "KL when it alone is quantised"],
            [[str(layer), f"{found.kl[layer]:.2g}"] for layer in found.ranking],
        )
        console.print(f"KL of the quantised checkpoint on the calibration text: {prepared.kl:.3g}")
