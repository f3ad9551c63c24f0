"""Keep what third parties print while they convert away from the user's terminal."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Silence torch about `torch.jit.trace`, which is the front end that handles states.

    It is deprecated in favour of `torch.export`, which cannot express a write at a position that
    is an input; and it warns of every shape that becomes a constant, which is what we want. It also
    reads every attribute of a module, the deprecated ones of transformers among them.
    """
    from torch.jit import TracerWarning  # type: ignore[attr-defined]

    with _level("transformers", logging.ERROR), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        yield


@contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Import coremltools and use it without its warnings and bars.

    It warns of a newer torch and scikit-learn than it was tested with and, off the Mac, of the
    missing runtime; and it draws a bar per pass over our own progress.
    """
    with _level("coremltools", logging.ERROR), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="coremltools.*")
        from coremltools.converters.mil.frontend.torch import ops
        from coremltools.converters.mil.mil.passes import pass_pipeline
        from coremltools.optimize.coreml import _quantization_passes

        with (
            replaced(ops, "_tqdm", _no_bar),
            replaced(pass_pipeline, "tqdm", _no_bar),
            replaced(_quantization_passes, "tqdm", _no_bar),
        ):
            yield


@contextmanager
def _level(name: str, level: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute of a module or class while the block runs."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _no_bar(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
