"""Load a checkpoint the way every user does: plain transformers, no patched class."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedTokenizerBase


def load_model(
    folder: Path, *, dtype: "torch.dtype", device: str = "cpu", attention: str | None = None
) -> Any:
    """`AutoModelForCausalLM` in evaluation mode, complete or not at all.

    Args:
        folder: a checkpoint folder.
        dtype: of the parameters in memory.
        device: a torch device; "auto" is the best one that this machine has.
        attention: transformers' name of an attention implementation; its default where None.

    Raises:
        CheckpointError: transformers cannot load the folder, or would fill tensors with noise.
    """
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, with the missing ones
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"transformers cannot load the model: {' '.join(str(error).split())}",
                where=str(folder),
                fix="`upcycle inspect` says what is in the folder",
            ) from error
    absent = [*sorted(report["missing_keys"]), *sorted(n for n, *_ in report["mismatched_keys"])]
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensors of {type(model).__name__} are missing or have another shape, "
            f"such as {absent[0]}",
            where=str(folder),
            fix="fetch or convert the checkpoint again",
        )
    return model.to(best_device(device)).eval()


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """A checkpoint's own tokenizer.

    Raises:
        CheckpointError: the folder has none that loads without remote code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise CheckpointError(
            f"the tokenizer does not load: {type(error).__name__}: {' '.join(str(error).split())}",
            where=str(folder),
            fix="put the tokenizer's files beside the weights",
        ) from error


def best_device(device: str) -> str:
    """Resolve "auto" to cuda, mps or cpu."""
    import torch

    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@contextmanager
def _quiet() -> "Iterator[None]":
    """No loading bar and no report: the caller has a bar of its own, and reports are checked."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
