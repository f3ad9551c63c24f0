"""Arguments that several commands share, under one name and with one help text."""

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[str, typer.Argument(help="A checkpoint folder, Hub cache snapshot or Hub id.")]
KvHeads = Annotated[int, typer.Option("--kv-heads", help="KV heads to make, g.")]
Method = Annotated[str, typer.Option("--method", help="How a group becomes one head.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of methods that draw.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Computation dtype: float32, bfloat16 …")]
Output = Annotated[Path, typer.Argument(help="The folder to make.")]
