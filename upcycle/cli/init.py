"""`upcycle init`: a commented recipe for the user's own checkpoint."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from upcycle.cli.console import Console, Outcome, command
from upcycle.errors import OutputError, PlanError

_PACKAGE = Path(__file__).parents[1]
RECIPE, DEMO = "recipe.yaml", "demo.yaml"
_LONGEST = 2048  # tokens per row: enough for most text, and affordable


@command("init", epilog="Example: upcycle init my-run --source recipes/demo-source --kv-heads 2")
def init_command(
    console: Console,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="SRC", help="The checkpoint: a folder or a Hub id."),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            "--kv-heads", help="KV heads to make. [default: about a quarter of the source's]"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Text to train on; may be repeated."),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Write the demo's recipes, checkpoint and text instead.")
    ] = False,
) -> Outcome:
    """Write a recipe for your own checkpoint into DIR, with every key explained."""
    if demo:
        if source is not None or kv_heads is not None or text:
            raise PlanError(
                "the demo's files have their own checkpoint, KV heads and text",
                where="--demo",
                fix="pass --demo alone, or drop it for a recipe of your own",
            )
        return _write_demo(console, folder)
    if source is None:
        raise PlanError(
            "no checkpoint is named",
            where="--source",
            fix="pass --source SRC, a folder or a Hub id; or --demo for the demo's files",
        )
    path = folder / RECIPE
    if path.exists():
        raise OutputError(
            f"{path} is there already", where=str(path), fix="name another folder, or remove it"
        )
    values, notes = _values(source, folder, kv_heads, text or [])
    from upcycle.checkpoint.staging import write_file, writing
    from upcycle.recipe.template import recipe_text

    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, recipe_text(values, notes))
    console.print(f"{path}: {source} to {values['convert']['kv_heads']} KV heads")
    if not text:
        console.print(f"put text to train on into {folder / 'text'}, or name it in the recipe")
    console.print(f"see `upcycle doctor {path}` for what is missing, then `upcycle run {path}`")
    return Outcome({"recipe": str(path), "kv_heads": values["convert"]["kv_heads"]})


def shipped_recipes() -> Path:
    """The folder of the demo's recipes: inside the installed package, or beside it in a clone."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def _write_demo(console: Console, folder: Path) -> Outcome:
    from upcycle.checkpoint.staging import staged

    names = ("*.yaml", "demo-source/*", "demo-text/*")
    files = sorted(file for name in names for file in shipped_recipes().glob(name))
    with staged(folder) as partial:
        for file in files:
            path = partial / file.relative_to(shipped_recipes())
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, path)
    console.print(f"{folder}: {len(files)} files; see `upcycle run {folder / DEMO}`")
    return Outcome({"recipe": str(folder / DEMO), "files": len(files)})


def _values(
    source: str, folder: Path, kv_heads: int | None, text: list[Path]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What the recipe says of a checkpoint, and notes on it by key."""
    from upcycle.checkpoint.reader import Checkpoint
    from upcycle.models.loading import class_config
    from upcycle.planning import plan

    checkpoint = Checkpoint.describe(source)
    shape = plan(checkpoint, kv_heads=1).source_shape
    now, valid = shape.num_key_value_heads, shape.valid_kv_heads
    fewer = [heads for heads in valid if heads < now]
    if not fewer:
        raise PlanError(
            f"{source} has one KV head already: nothing to merge",
            where="--source",
            fix="name a checkpoint with more KV heads",
        )
    wanted = kv_heads if kv_heads is not None else _quarter(fewer, now)
    plan(checkpoint, kv_heads=wanted)  # refused here in the words of convert
    # The class knows the key's other names, and its default where the configuration has none.
    settings = class_config(checkpoint.config).get_text_config()
    length = min(_LONGEST, getattr(settings, "max_position_embeddings", None) or _LONGEST)
    local = Path(source).is_dir()
    values = {
        "source": str(Path(source).resolve()) if local else source,
        "output": "run",
        "convert": {"kv_heads": wanted, "calibration": ["builtin"], "refine": 200},
        "train": {
            "data": {"sources": [str(path.resolve()) for path in text] or ["text"]},
            "sequence_length": length,
            "batch_size": 16,
            "micro_batch_size": 1,
            "steps": 500,
            "learning_rate": 2e-5,
            "warmup_steps": 20,
        },
        "evaluate": {"sequence_length": min(512, length)},
    }
    notes = {
        "convert.kv_heads": f"The source has {now}; valid: {', '.join(map(str, valid))}.",
        "convert.calibration": "Text like the model's own is better; for a chat model add self.",
        "train.data.sources": "Paths here are relative to this file.",
        "train.learning_rate": "About a tenth of the source's own peak is a start.",
    }
    return values, notes


def _quarter(fewer: list[int], now: int) -> int:
    """The largest valid number up to a quarter of the source's, or the smallest one."""
    return max((heads for heads in fewer if 4 * heads <= now), default=min(fewer))
