"""Arguments that several commands share, under one name and with one help text."""

from pathlib import Path
from typing import Annotated

import typer

from upcycle.byte_sizes import parse_bytes
from upcycle.kvcache.deployment import BATCHED_TOKENS, BATCHED_TOKENS_LARGE
from upcycle.planning import Plan

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint folder, Hub cache snapshot or Hub id.")
]
KvHeads = Annotated[int, typer.Option("--kv-heads", help="KV heads to make, g.")]
Method = Annotated[str, typer.Option("--method", help="How a group becomes one head.")]
Calibration = Annotated[
    list[str] | None,
    typer.Option("--calibration", help="Text: a file, a folder or builtin; may be repeated."),
]
CalibrationTokens = Annotated[
    int,
    typer.Option("--calibration-tokens", min=1, help="Tokens of it to use, in sequences of 512."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of methods that draw.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
MaxShardSize = Annotated[
    str | None,
    typer.Option("--max-shard-size", help="Size of an output file: 5GB …; else the source's."),
]
DropExtraAttention = Annotated[
    bool,
    typer.Option(
        "--drop-extra-attention",
        help="Leave multi-token prediction out, or what else has attention beside the decoder's.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Computation dtype: float32, bfloat16 …")]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="Storage type of the cache: bf16, fp16, fp32, fp8, int8, int4 … or auto.",
    ),
]
BatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--batched-tokens",
        help="Tokens that the server computes in one step (vLLM's --max-num-batched-tokens), "
        f"which layers with a window hold too. [default: vLLM's, {BATCHED_TOKENS_LARGE:,} on GPUs "
        f"of 70 GiB or more but the A100, else {BATCHED_TOKENS:,}]",
    ),
]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A .yaml or .py recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values instead of the recipe's."),
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="Also write the result as one HTML page.")
]


def extra_attention_lines(todo: Plan, how: str) -> list[str]:
    """What becomes of attention outside the decoder's layers, one line for each outcome.

    Args:
        todo: the plan.
        how: what is done to it where KV heads are merged.
    """
    lines = []
    now = todo.source_shape.num_key_value_heads
    if todo.extra and todo.num_key_value_heads != now:
        names = _few([extra.module for extra in todo.extra])
        how = "KV heads repeated" if todo.num_key_value_heads > now else how
        lines.append(f"attention outside the decoder's layers, {how}: {names}")
    if todo.dropped:
        blocks = _few(list(dict.fromkeys(extra.block for extra in todo.dropped)))
        lines.append(f"dropped {blocks}: {todo.dropped_tensors:,} tensors")
    return lines


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def shard_bytes(size: str | None) -> int | None:
    """The bytes that `--max-shard-size` names."""
    return None if size is None else parse_bytes(size, where="--max-shard-size")
