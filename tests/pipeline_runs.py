"""A tiny recipe, and commands on it: in this process, or in processes of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from tests.tiny import tiny_checkpoint
from upcycle.cli.app import app
from upcycle.training.log import read_log

ROOT = Path(__file__).parents[1]
TRAIN = {
    "data": {"sources": [{"path": "text.jsonl"}]},
    "sequence_length": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "steps": 6,
    "learning_rate": 1.0e-3,
    "precision": "fp32",
    "checkpoint_every": 2,
    "keep_last": 9,
}


@dataclass(frozen=True)
class TinyPipeline:
    """A recipe file, its source beside it and its output folder `out`."""

    recipe: Path

    @property
    def folder(self) -> Path:
        """Where everything lies."""
        return self.recipe.parent

    @property
    def out(self) -> Path:
        """The recipe's output."""
        return self.folder / "out"

    def convert(self, *options: object) -> Result:
        """`upcycle convert` as the recipe asks for it."""
        return call(
            "convert", self.folder / "source", self.out / "converted", "--kv-heads", 2, *options
        )

    def steps(self) -> list[int]:
        """The steps that were trained, each as often as it was."""
        return [
            row.step for row in read_log(self.out / "training" / "log.jsonl") if row.lr is not None
        ]

    def states(self) -> dict[str, int]:
        """The states, each with the time at which it was written."""
        found = sorted((self.out / "training").glob("step-*"))
        return {folder.name: (folder / "state.json").stat().st_mtime_ns for folder in found}


def tiny_pipeline(folder: Path, **changes: Any) -> TinyPipeline:
    """Convert to 2 KV heads, train for 6 steps, and evaluate."""
    tiny_checkpoint(folder / "source")
    lines = [json.dumps({"text": f"row {i} of a small text, {i * i}"}) for i in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    document = {
        "source": "source",
        "output": "out",
        "convert": {"kv_heads": 2},
        "train": {**TRAIN, **changes},
        "evaluate": {"text": ["text.jsonl"], "max_tokens": 100, "sequence_length": 32},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document))
    return TinyPipeline(folder / "recipe.yaml")


def call(command: str, *arguments: object) -> Result:
    """A command in this process."""
    import_module(f"upcycle.cli.{command.replace('-', '_')}")
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def start(
    *arguments: object, processes: int = 1, launcher: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    """A command in a process of its own, or in several that `torchrun` starts."""
    words: tuple[str, ...] = launcher
    if not words and processes > 1:
        words = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return subprocess.Popen(
        [sys.executable, *words, "-m", "upcycle", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
