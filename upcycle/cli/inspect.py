"""`upcycle inspect`: what a checkpoint is, and what a conversion would save."""

from dataclasses import asdict

from upcycle.checkpoint.reader import Checkpoint
from upcycle.cli.arguments import BatchedTokens, KvDtype, Source
from upcycle.cli.console import Console, Outcome, command, format_bytes
from upcycle.kvcache.cache_dtype import cache_dtype
from upcycle.kvcache.deployment import BATCHED_TOKENS, BATCHED_TOKENS_LARGE, nonsense
from upcycle.kvcache.inspection import REFERENCE_LENGTH, Inspection, inspect_checkpoint


@command("inspect", epilog="Example: upcycle inspect recipes/demo-source")
def inspect_command(
    console: Console,
    source: Source,
    kv_dtype: KvDtype = None,
    batched_tokens: BatchedTokens = None,
) -> Outcome:
    """Show heads, KV cache per token, and what each valid number of KV heads would save.

    Reads config.json and the safetensors headers; no weights.
    """
    if batched_tokens is not None and batched_tokens < 1:
        raise nonsense("batched_tokens", batched_tokens, "give 1 or more")
    inspection = inspect_checkpoint(
        Checkpoint.describe(source), kv_dtype=kv_dtype, batched_tokens=batched_tokens
    )
    _show(console, source, inspection)
    data = {"source": source, **asdict(inspection)}
    return Outcome({**data, "reference_length": REFERENCE_LENGTH})


def _show(console: Console, source: str, inspection: Inspection) -> None:
    shape, now = inspection.shape, inspection.now
    dtypes = ", ".join(
        f"{dtype} {format_bytes(count)}" for dtype, count in inspection.bytes_by_dtype.items()
    )
    becomes = ""
    if inspection.loads_as != inspection.model_type:
        becomes = f", which becomes {inspection.loads_as} (exactly), whose class shares KV heads"
    console.print(f"{source}: {inspection.model_type}{becomes}")
    console.print(
        f"attention   {inspection.kind}: {shape.num_attention_heads} query heads, "
        f"{shape.num_key_value_heads} KV heads, head_dim {shape.head_dim}, "
        f"{shape.num_layers} layers"
    )
    console.print(f"weights     {inspection.num_parameters:,} parameters, {dtypes}")
    console.print(
        f"KV cache    {now.kv_bytes_per_token:,} B/token at {cache_dtype(inspection.kv_dtype)}, "
        f"{format_bytes(inspection.cache_bytes)} "
        f"for {REFERENCE_LENGTH:,} tokens"
    )
    for module, problem in inspection.extra_attention.items():
        fate = "converted like a layer" if problem is None else f"can only be dropped: {problem}"
        console.print(f"            beside the decoder {module}, {fate}")
    if inspection.window_layers:
        console.print(
            f"            {inspection.window_layers} layers cache a window alone, as transformers "
            f"does; a server that computes {inspection.batched_tokens:,} tokens in one step"
        )
        console.print(
            f"            (--batched-tokens; vLLM: {BATCHED_TOKENS:,} or {BATCHED_TOKENS_LARGE:,}) "
            f"sets {format_bytes(inspection.reserved_bytes)} aside for {REFERENCE_LENGTH:,} tokens"
        )
    if inspection.state_elements:
        console.print(
            f"            {inspection.state_elements:,} elements of state a sequence beside it"
        )
    console.print()
    console.table(
        (
            "KV heads",
            "kind",
            "KV B/token",
            f"cache saved at {REFERENCE_LENGTH:,}",
            "weights saved",
            "tensor parallel",
        ),
        [
            (
                f"{choice.kv_heads} (now)" if choice == now else str(choice.kv_heads),
                choice.kind,
                f"{choice.kv_bytes_per_token:,}",
                format_bytes(choice.cache_bytes_saved),
                format_bytes(choice.weight_bytes_saved),
                str(choice.tensor_parallel),
            )
            for choice in inspection.choices
        ],
    )
    if inspection.nothing_to_merge:
        console.print(inspection.nothing_to_merge)
    console.print()
    console.table(
        (
            *("attention", "elements/token/layer", "core MACs/token", "K/V MACs/token"),
            *("decode bytes", "FLOP/B", "prefill bytes", "FLOP/B"),
        ),
        [
            (
                f"g={counts.kv_heads}" if counts.kv_heads else "MLA *",
                f"{counts.elements_per_token_and_layer:,}",
                f"{counts.core_macs:,}",
                f"{counts.projection_macs:,}",
                format_bytes(counts.decode_bytes),
                f"{counts.decode_intensity:,.1f}",
                format_bytes(counts.prefill_bytes),
                f"{counts.prefill_intensity:,.0f}",
            )
            for counts in (*inspection.counts, inspection.latent_counts)
        ],
    )
    console.print()
    console.print(
        f"attention of all layers at {REFERENCE_LENGTH:,} tokens, without its weights: one token "
        "decoded, and all in a prefill"
    )
    console.print(
        "* with the latent that DeepSeek-V2 gives heads of this size, for comparison: no "
        "conversion makes it"
    )
