"""What a conversion does with calibration text."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.manifest import hash_path
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import PlanError, warn
from upcycle.models.calibration_text import (
    calibration_rows,
    path_of,
    unseen_template_tokens,
)
from upcycle.models.loading import choose_device
from upcycle.options.base import SELF
from upcycle.options.convert import ConvertOptions, MergeOptions
from upcycle.planning import Plan
from upcycle.progress import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from upcycle.conversion.layer_store import LayerStore


def check_options(options: MergeOptions) -> None:
    """Refuse what cannot be done as asked.

    Raises:
        PlanError: an unknown method, or no text where it is needed.
        DeviceError: this machine lacks the device.
    """
    from upcycle.heads.methods import get_method

    choose_device(options.device)
    method = get_method(options.method_name)
    needs = {
        f"method {method.name}": method.needs_calibration,
        "--refine": options.refine > 0,
        "--grouping search": options.grouping == "search",
    }
    for name, needed in needs.items():
        if needed and not options.calibration:
            raise PlanError(
                f"{name} needs text to measure on",
                where="--calibration",
                fix="give text like the model's own, or --calibration builtin for a short "
                "text that comes with upcycle",
            )


def check_order(options: MergeOptions, todo: Plan) -> None:
    """Refuse what would change the model that is planned otherwise than by merging.

    Raises:
        PlanError: a search would reorder heads that have their places.
    """
    now, wanted = todo.source_shape.num_key_value_heads, todo.num_key_value_heads
    if options.grouping == "search" and todo.source_shape.alibi and 1 < wanted < now:
        raise PlanError(
            "a search would put heads into another order: ALiBi's slope of a query head goes "
            "by its place, and stays there",
            where="--grouping search",
            fix="group neighbours: --grouping contiguous",
        )


def uses_seed(options: MergeOptions) -> bool:
    """Whether another seed gives another result: rows of text are drawn by it."""
    from upcycle.heads.methods import get_method

    return bool(options.calibration) or get_method(options.method_name).draws


def text_hashes(options: MergeOptions) -> list[str | dict[str, str]]:
    """Content hashes of the texts, which tell the same text under another name.

    What the source writes itself follows from the source and the options: its word stands for it.
    """
    return [SELF if str(text) == SELF else hash_path(path_of(text)) for text in options.calibration]


def reads_text(options: MergeOptions, todo: Plan) -> bool:
    """Whether anything is measured: something is merged, and there is text."""
    now = todo.source_shape.num_key_value_heads
    return bool(options.calibration) and todo.num_key_value_heads < now


def text_rows(options: MergeOptions, checkpoint: Checkpoint) -> "Tensor":
    """Token ids [B, T] to measure on.

    Args:
        options: whose texts are files, see `with_own_text`.
        checkpoint: whose tokenizer is used.

    Raises:
        CheckpointError: there is no tokenizer.
        DataError: the text cannot be read, or there is too little of it.
    """
    rows = calibration_rows(
        checkpoint,
        options.calibration,
        tokens=options.calibration_tokens,
        sequence_length=options.calibration_window,
        weights=options.shares,
        seed=options.seed,
    )
    if unseen := unseen_template_tokens(checkpoint, rows):
        warn(
            f"the calibration text has no chat: none of {', '.join(unseen)}, which the chat "
            f"template writes, is in it, and what is not seen is not kept; add --calibration {SELF}"
        )
    return rows


def merge_layers(
    options: ConvertOptions,
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
        refine_steps=options.refine,
        refine_precision=options.refine_precision,
        search=options.grouping == "search",
        device=options.device,
    )
    next_layer, hidden = store.take_state()
    if next_layer:
        work.restore(next_layer, hidden)
    for merged in work.layers(watch):
        store.save(merged.layer, merged.tensors, asdict(merged.report))
        store.save_state(*work.state())
        del merged  # before the next layer is loaded
    return [store.report(layer) for layer in todo.source_shape.attention_layers]
