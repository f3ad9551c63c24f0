"""`upcycle plan`: what a conversion would do, before any weight is read."""

from typing import Annotated

from upcycle.checkpoint.reader import Checkpoint
from upcycle.cli.arguments import Source, extra_attention_lines
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.cli.flags import Only
from upcycle.errors import warn
from upcycle.heads.methods import get_method
from upcycle.kvcache.deployment import serving_line
from upcycle.kvcache.recommendation import nothing_to_merge
from upcycle.kvcache.sampling import sampling_bytes
from upcycle.options.base import SELF
from upcycle.options.convert import ConvertOptions
from upcycle.planning import Attention, plan

_PLANNED = Only(
    ("kv_heads", "method", "calibration", "seed", "max_shard_size", "drop_extra_attention")
)


@command("plan", epilog="Example: upcycle plan recipes/demo-source --kv-heads 2")
def plan_command(
    console: Console,
    source: Source,
    options: Annotated[ConvertOptions, _PLANNED],
) -> Outcome:
    """List every tensor operation, sizes and peak memory before any weight is read."""
    todo = plan(
        source,
        kv_heads=options.kv_heads,
        method=options.method_name,
        seed=options.seed,
        max_shard_size=options.max_shard_size,
        drop_extra_attention=options.drop_extra_attention,
    )
    kv_heads = options.kv_heads
    rows = []
    for operation in todo.operations:
        output = operation.output
        change = "copy"
        if isinstance(operation, Attention):
            change = f"layer {operation.layer} {operation.role}"
            if operation.source_shape is None:
                change += ", new"
            elif operation.source_shape != output.shape:
                change += f", was {list(operation.source_shape)}"
        size = format_bytes(output.nbytes)
        rows.append([output.name, output.dtype, str(list(output.shape)), size, change])
    console.table(["tensor", "dtype", "shape", "size", "operation"], rows)
    shape = todo.source_shape
    console.print(
        f"\n{todo.model_type}: {shape.num_attention_heads} query heads, "
        f"{shape.num_key_value_heads} → {kv_heads} KV heads; {len(todo.shards)} shard(s), "
        f"{format_bytes(todo.output_bytes)} to write, "
        f"at most {format_bytes(todo.peak_bytes)} of attention in memory"
    )
    if kv_heads == shape.num_key_value_heads:
        same = nothing_to_merge(shape) or "as many KV heads as now: nothing to merge"
        console.print(f"{same}; every tensor is copied")
    for line in extra_attention_lines(todo, "merged like one of them"):
        console.print(line)
    if kv_heads < shape.num_key_value_heads:
        chosen = get_method(todo.method)
        console.print(f"{chosen.name}: {chosen.does or 'of another package'} ({chosen.reference})")
    sampling = sampling_bytes(Checkpoint.describe(source)) if options.own_text else None
    if sampling is not None:
        console.print(
            f"--calibration {SELF}: the source writes text first, held whole with its cache: "
            f"{format_bytes(sampling)} of memory"
        )
    console.print(serving_line(shape.num_attention_heads, kv_heads))
    for warning in todo.warnings:
        warn(warning)
    return Outcome({**todo.to_dict(), "sampling_bytes": sampling})
