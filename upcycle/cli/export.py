"""`upcycle export`: make a Core ML package."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upcycle.byte_sizes import parse_bytes
from upcycle.cli.arguments import Calibration, Overwrite, Source
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import ExportError
from upcycle.options.attention_forms import FORMS_HELP, QFOLD

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
    context: Annotated[
        int, typer.Option("--context", help="Positions that the KV cache holds, a multiple of 32.")
    ] = 512,
    prefill: Annotated[
        int | None,
        typer.Option(
            "--prefill",
            help="Tokens per call of a second function, such as 64; less than the context.",
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option("--attention", help=FORMS_HELP),
    ] = QFOLD.name,
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
        int,
        typer.Option("--split-head", help="Parts that the output head is split into, up to 64."),
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
        bool,
        typer.Option(
            "--untie",
            help="With --quantize: give a tied output matrix a scheme of its own, as in mixed.",
        ),
    ] = False,
    chunk_size: Annotated[
        str | None,
        typer.Option(
            "--chunk-size",
            help="Cut the layers into packages with at most so much of weights each, such as 1GB, "
            "in a folder OUT.",
        ),
    ] = None,
    calibration: Calibration = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Export SRC as a program of Core ML (iOS 18) or Core AI that decodes token by token."""
    from upcycle.export.coreai.exporting import SUFFIX, export_coreai
    from upcycle.export.coreml import export_coreml
    from upcycle.export.options import ExportOptions
    from upcycle.export.risks import device_notes

    options = ExportOptions(
        context, prefill, attention, kv_cache, conv, split_head, argmax, quantize, untie,
        None if chunk_size is None else parse_bytes(chunk_size, where="--chunk-size"),
    )  # fmt: skip
    if calibration and quantize is None:
        raise ExportError(
            "there is nothing to calibrate without quantised weights",
            where="--calibration",
            fix="pass --quantize too, or leave --calibration away",
        )
    common: dict[str, Any] = {"options": options, "overwrite": overwrite}
    with console.progress() as watch:
        if output.suffix == SUFFIX:
            result = export_coreai(source, output, **common, watch=watch)
        else:
            if calibration:
                common["calibration"] = calibration
            result = export_coreml(source, output, **common, watch=watch)
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
    for chunk in result.manifest["result"].get("chunks", ()):
        _show_chunk(console, chunk)
    if prefill is not None:
        console.print(f"the function `prefill` takes {prefill} tokens per call")
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
            **asdict(result.options),
            "decoder": asdict(shape),
            "operations": function.histogram.total(),
            "kv_tiles": len(kv_tiles),
            "kv_tile_bytes": kv_tile_bytes,
            "kv_cache_bytes": cache,
            "notes": notes,
            "manifest": result.manifest,
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
