"""A tiny run: one random checkpoint as source, another as its student."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_checkpoint
from upcycle.options.train import TrainOptions
from upcycle.training.loop import uptrain
from upcycle.training.result import TrainResult

_FLAGS = ("resume", "overwrite", "allow_change", "tell", "command")


@dataclass(frozen=True)
class TinyRun:
    """The folders of a run, and how to start it."""

    folder: Path
    student: Path
    teacher: Path
    text: Path

    def recipe(self, **changes: Any) -> TrainOptions:
        settings: dict[str, Any] = {
            "data": {"sources": [{"path": self.text}]},
            "sequence_length": 16,
            "batch_size": 8,
            "micro_batch_size": 4,
            "steps": 6,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "precision": "fp32",
            "checkpoint_every": 2,
            "evaluate_every": 3,
        }
        settings.update(changes)
        return TrainOptions.model_validate(settings)

    def train(
        self, name: str = "out", *, work: str | None = None, watch: Any = None, **changes: Any
    ) -> TrainResult:
        flags = {key: changes.pop(key) for key in _FLAGS if key in changes}
        if watch is not None:
            flags["watch"] = watch
        return uptrain(
            self.student,
            self.teacher,
            self.recipe(**changes),
            self.folder / name,
            self.folder / (work or f"{name}-training"),
            **flags,
        )


def tiny_run(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    model_type: str = "llama",
    **overrides: Any,
) -> TinyRun:
    """Documents of very different lengths, a source, and a student with other weights."""
    text = folder / "text.jsonl"
    lengths = [1 + (37 * index) % 61 for index in range(60)]
    words = "the quick brown fox jumps over the lazy dog and runs away from here at once "
    text.write_text(
        "".join(
            '{"text": "' + (words * 2)[i : i + n].strip() + 'x"}\n' for i, n in enumerate(lengths)
        )
    )
    student = tiny_checkpoint(folder / "student", model_type, seed=1, dtype=dtype, **overrides)
    teacher = tiny_checkpoint(folder / "teacher", model_type, seed=0, dtype=dtype, **overrides)
    return TinyRun(folder, student, teacher, text)
