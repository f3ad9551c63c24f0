"""Arguments that several commands share, under one name and with one help text."""

from pathlib import Path
from typing import Annotated

import typer

from upcycle.kvcache.sizes import parse_bytes

Source = Annotated[str, typer.Argument(help="A checkpoint folder, Hub cache snapshot or Hub id.")]
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
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Computation dtype: float32, bfloat16 …")]
Output = Annotated[Path, typer.Argument(help="The folder to make.")]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A .yaml or .py recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values instead of the recipe's."),
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="Also write the result as one HTML page.")
]


def tensor_parallel_limit(kv_heads: int) -> str:
    """What a number of KV heads means for serving on several GPUs."""
    return (
        f"serves with tensor parallel up to {kv_heads} before GPUs hold copies of the same KV heads"
    )


def shard_bytes(size: str | None) -> int | None:
    """The bytes that `--max-shard-size` names."""
    return None if size is None else parse_bytes(size, where="--max-shard-size")
