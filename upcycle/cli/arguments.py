"""Arguments that several commands share, under one name and with one help text."""

from pathlib import Path
from typing import Annotated

import typer

from upcycle.kvcache.deployment import BATCHED_TOKENS, BATCHED_TOKENS_LARGE
from upcycle.planning import Plan

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint folder, Hub cache snapshot or Hub id.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
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
    typer.Argument(metavar="section.key=value", help="Values that replace the recipe's."),
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
