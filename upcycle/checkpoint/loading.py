"""Load a checkpoint the way every user does: plain transformers, no patched class."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedTokenizerBase


def load_model(folder: Path, *, dtype: "torch.dtype", device: str = "cpu") -> Any:
    """`AutoModelForCausalLM` in evaluation mode.

    Args:
        folder: a checkpoint folder.
        dtype: of the parameters in memory.
        device: a torch device; "auto" is the best one that this machine has.

    Raises:
        CheckpointError: transformers cannot load the folder.
    """
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"transformers cannot load {folder}: {error}",
                where=str(folder),
                fix="`upcycle inspect` says what is in the folder",
            ) from error
    return model.to(best_device(device)).eval()


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """A checkpoint's own tokenizer.

    Raises:
        CheckpointError: the folder has none that loads without remote code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"the tokenizer does not load: {str(error).splitlines()[0]}",
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
    """No loading bar: the caller has one of its own, or wants none."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
