"""What a conversion does with calibration text, as asked for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.manifest import hash_path
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import PlanError
from upcycle.models.calibration_text import calibration_rows, path_of
from upcycle.models.loading import choose_device
from upcycle.planning import Plan
from upcycle.progress import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from upcycle.conversion.layer_store import LayerStore

CALIBRATION_TOKENS = 32_768
_SEQUENCE_LENGTH = 512
GROUPINGS = ("contiguous", "search")


@dataclass(frozen=True)
class Calibration:
    """The options of `convert` that need text.

    Attributes:
        texts: files, folders, or "builtin"; empty for none.
        tokens: how many tokens to use.
        refine: optimiser steps for each layer.
        grouping: "contiguous" or "search".
        device: where layers run, see `choose_device`.
    """

    texts: Sequence[str | Path]
    tokens: int
    refine: int
    grouping: str
    device: str = "auto"

    @property
    def default_method(self) -> str:
        """The method where none is named."""
        return "lowrank" if self.texts else "mean"

    def method(self, name: str | None) -> str:
        """The method's name, after checking that all can be done as asked.

        Raises:
            PlanError: an unknown method or grouping, a negative number, or no text where it is
                needed.
            DeviceError: this machine lacks the device.
        """
        from upcycle.heads.methods import get_method

        choose_device(self.device)
        method = get_method(name or self.default_method)
        if self.grouping not in GROUPINGS:
            raise PlanError(
                f"there is no grouping {self.grouping!r}",
                where="--grouping",
                fix=f"choose one of {', '.join(GROUPINGS)}",
            )
        if self.refine < 0:
            raise PlanError(
                f"{self.refine} steps of refinement", where="--refine", fix="0 or more steps"
            )
        needs = {
            f"method {method.name}": method.needs_calibration,
            "--refine": self.refine > 0,
            "--grouping search": self.grouping == "search",
        }
        for name, needed in needs.items():
            if needed and not self.texts:
                raise PlanError(
                    f"{name} needs text to measure on",
                    where="--calibration",
                    fix="give text like the model's own, or --calibration builtin for a short "
                    "text that comes with upcycle",
                )
        return method.name

    def check(self, todo: Plan) -> None:
        """Refuse what would change the model that is planned otherwise than by merging.

        Raises:
            PlanError: a search would reorder heads that have their places.
        """
        now, wanted = todo.source_shape.num_key_value_heads, todo.num_key_value_heads
        if self.grouping == "search" and todo.source_shape.alibi and 1 < wanted < now:
            raise PlanError(
                "a search would put heads into another order: ALiBi's slope of a query head goes "
                "by its place, and stays there",
                where="--grouping search",
                fix="group neighbours: --grouping contiguous",
            )

    @property
    def options(self) -> dict[str, Any]:
        """What shapes the result, for the manifest."""
        return {
            "calibration": [Path(text).name for text in self.texts],
            "calibration_tokens": self.tokens if self.texts else None,
            "refine": self.refine,
            "grouping": self.grouping,
        }

    def uses_seed(self, method: str) -> bool:
        """Whether another seed gives another result: rows of text are drawn by it."""
        from upcycle.heads.methods import get_method

        return bool(self.texts) or get_method(method).draws

    def hashes(self) -> list[str | dict[str, str]]:
        """Content hashes of the texts, which tell the same text under another name."""
        return [hash_path(path_of(text)) for text in self.texts]

    def rows(self, checkpoint: Checkpoint, todo: Plan) -> "Tensor | None":
        """Token ids [B, T] to measure on, or None where nothing is merged or there is no text.

        Raises:
            CheckpointError: there is no tokenizer.
            DataError: the text cannot be read, or there is too little of it.
        """
        if not self.texts or todo.num_key_value_heads >= todo.source_shape.num_key_value_heads:
            return None
        return calibration_rows(
            checkpoint,
            self.texts,
            tokens=self.tokens,
            sequence_length=_SEQUENCE_LENGTH,
            seed=todo.seed,
        )

    def merge(
        self,
        checkpoint: Checkpoint,
        todo: Plan,
        rows: "Tensor",
        store: "LayerStore",
        watch: Watcher,
    ) -> list[dict[str, Any]]:
        """Merge every layer that the store does not have yet into it; what was measured of each.

        Raises:
            CheckpointError: a tensor is missing or not finite.
            DataError: there are too few rows to refine.
            FamilyError: the class's attention has a feature that calibration does not know.
        """
        from upcycle.conversion.calibrated import CalibratedConversion

        work = CalibratedConversion(
            checkpoint,
            todo,
            rows,
            refine_steps=self.refine,
            search=self.grouping == "search",
            device=self.device,
        )
        next_layer, hidden = store.take_state()
        if next_layer:
            work.restore(next_layer, hidden)
        for merged in work.layers(watch):
            store.save(merged.layer, merged.tensors, asdict(merged.report))
            store.save_state(*work.state())
            del merged  # before the next layer is loaded
        return [store.report(layer) for layer in todo.source_shape.attention_layers]
