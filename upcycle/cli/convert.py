"""`upcycle convert`: make a checkpoint with fewer (or more) KV heads."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from upcycle import stopping
from upcycle.cli.arguments import (
    Calibration,
    CalibrationTokens,
    Device,
    DropExtraAttention,
    KvHeads,
    MaxShardSize,
    Output,
    Overwrite,
    Seed,
    Source,
    extra_attention_lines,
    shard_bytes,
)
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.errors import warn
from upcycle.kvcache.parallel import serving_line
from upcycle.planning import Copy

if TYPE_CHECKING:
    from upcycle.conversion.measured import MeasuredLayer


@command("convert", epilog="Example: upcycle convert recipes/demo-source out --kv-heads 2")
def convert_command(
    console: Console,
    source: Source,
    output: Output,
    kv_heads: KvHeads,
    method: Annotated[
        str | None,
        typer.Option("--method", help="mean, or lowrank with --calibration; see the README."),
    ] = None,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = 32_768,
    refine: Annotated[
        int, typer.Option("--refine", min=0, help="Steps that fit each layer to the source's.")
    ] = 0,
    grouping: Annotated[
        str, typer.Option("--grouping", help="contiguous, or search for the best partners.")
    ] = "contiguous",
    device: Device = "auto",
    seed: Seed = 0,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="How a model that changes its class is stored: float16 …"),
    ] = None,
    max_shard_size: MaxShardSize = None,
    allow_nonfinite: Annotated[
        bool,
        typer.Option(
            "--allow-nonfinite", help="Merge NaN and infinity too; not with --calibration."
        ),
    ] = False,
    drop_extra_attention: DropExtraAttention = False,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")
    ] = False,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Also record SHA-256 of the source's weights.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 for tensors that the class has not so, or an auto_map."
        ),
    ] = False,
) -> Outcome:
    """Merge the KV heads of SRC into OUT, a plain Hugging Face checkpoint."""
    from upcycle.checkpoint.manifest import Manifest
    from upcycle.checkpoint.staging import staging_folder
    from upcycle.conversion.convert import convert, extra_method
    from upcycle.conversion.measured import measured_layers

    def how_to_go_on() -> str:
        if not staging_folder(output).exists():
            return "nothing half-written is kept"
        again = [word for word in sys.argv[1:] if word != "--resume"]
        return f"what is finished is kept; go on with: {shlex.join(['upcycle', *again])} --resume"

    stopping.advise(how_to_go_on, resumable=True)
    with console.progress() as watch:
        result = convert(
            source,
            output,
            kv_heads=kv_heads,
            method=method,
            calibration=calibration or (),
            calibration_tokens=calibration_tokens,
            refine=refine,
            grouping=grouping,
            device=device,
            seed=seed,
            dtype=dtype,
            max_shard_size=shard_bytes(max_shard_size),
            allow_nonfinite=allow_nonfinite,
            drop_extra_attention=drop_extra_attention,
            overwrite=overwrite,
            resume=resume,
            sha256=sha256,
            strict=strict,
            watch=watch,
        )
    before = result.plan.source_shape.num_key_value_heads
    console.print(
        f"{output}: {before} → {kv_heads} KV heads in {result.plan.source_shape.num_layers} "
        f"layers, {format_bytes(result.plan.output_bytes)}"
    )
    if result.resumed_shards:
        console.print(
            f"resumed: {result.resumed_shards} of {len(result.plan.shards)} shards were finished, "
            "and are unchanged"
        )
    copies = sum(isinstance(op, Copy) for op in result.plan.operations)
    console.print(f"{copies} tensors were copied, and compared byte by byte after writing")
    how = _how(extra_method(result.plan), calibrated=bool(calibration))
    for line in extra_attention_lines(result.plan, how):
        console.print(line)
    for line in result.left_behind_lines:
        console.print(line)
    console.print(serving_line(result.plan.source_shape.num_attention_heads, kv_heads))
    _show_layers(console, measured_layers(Manifest.model_validate(result.manifest)))
    console.print(_advice(before, kv_heads, result.plan.method, refine))
    for warning in result.plan.warnings:
        warn(warning)
    return Outcome(
        {
            "output": str(output),
            "manifest": dict(result.manifest),
            "left_behind": result.left_behind,
            "resumed_shards": result.resumed_shards,
            "warnings": [*result.warnings, *result.plan.warnings],
        }
    )


def _how(method: str, *, calibrated: bool) -> str:
    """How extra attention was merged."""
    if not calibrated:
        return f"merged by {method}"
    return f"merged by {method} from weights alone, since transformers cannot run it on text"


def _show_layers(console: Console, layers: "list[MeasuredLayer]") -> None:
    """What calibration measured of each layer, and what it did."""
    if not layers:
        return
    rows = []
    for layer in layers:
        refined, lost = layer.refinement, layer.residual
        error = f"{refined.before:.1%} → {refined.after:.1%}" if refined else "not refined"
        rows.append(
            [
                str(layer.layer),
                f"{lost.keys:.1%}",
                f"{lost.values:.1%}",
                error,
                layer.keys,
                layer.values,
            ]
        )
    console.table(["layer", "K lost", "V lost", "held-out error", "keys", "values"], rows)


def _advice(before: int, after: int, method: str, refine: int) -> str:
    if after == before:
        return "nothing was merged: the function is exactly the source's"
    if after > before:
        return "KV heads were repeated: the function is exactly the source's"
    if method in ("mean", "first", "random"):
        return (
            f"{method} merging costs much of the model's quality; --calibration TEXT keeps most of "
            "it, and --refine 200 nearly all: see `upcycle eval` for how much"
        )
    if not refine:
        return "--refine 200 fits each layer to the source's and heals most of what is left"
    return "see `upcycle eval` for what is left, and `upcycle train` to heal it"
