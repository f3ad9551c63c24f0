"""Load a checkpoint the way every user does: plain transformers, no patched class."""

import json
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from upcycle.checkpoint.files import under_utf8_name
from upcycle.checkpoint.remote_code import AUTO_MAP, tell_of_code
from upcycle.checkpoint.staging import scratch_folder
from upcycle.errors import CheckpointError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch
    from transformers import PreTrainedTokenizerBase

# What transformers raises for folders that it cannot make sense of.
UNLOADABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip

_OUTPUT_HEADS = ("lm_head.", "embed_out.")


def load_model(
    folder: Path,
    *,
    dtype: "torch.dtype",
    device: str = "cpu",
    attention: str | None = None,
    model_class: Any = None,
) -> Any:
    """`AutoModelForCausalLM` in evaluation mode, complete or not at all.

    Args:
        folder: a checkpoint folder.
        dtype: of the parameters in memory.
        device: see `choose_device`.
        attention: transformers' name of an attention implementation; its default where None.
        model_class: another class of transformers to load.

    Raises:
        CheckpointError: transformers cannot load the folder, or would fill tensors with noise; or
            it was saved from a class with another head, and none is given.
        DeviceError: this machine lacks the device.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    place = choose_device(device)
    with quiet(), under_utf8_name(folder) as named:
        try:
            settings = AutoConfig.from_pretrained(
                named, local_files_only=True, trust_remote_code=False
            )
            saved_from = saved_class(settings)
            if model_class is None and saved_from not in (None, *plain_classes(settings)):
                raise _no_causal_lm(saved_from.__name__, folder)
            model, report = (model_class or AutoModelForCausalLM).from_pretrained(
                named,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,  # nothing is unpickled
                trust_remote_code=False,  # and no code of the folder is run
                ignore_mismatched_sizes=True,  # reported below, with the missing ones
                output_loading_info=True,
            )
        except (*UNLOADABLE, SafetensorError) as error:
            raise CheckpointError(
                f"transformers cannot load the model: {said(error)}",
                where=str(folder),
                fix="`upcycle inspect` says what is in the folder",
            ) from error
    bare = saved_from is not None and saved_from is plain_classes(settings)[1]
    if model_class is None and bare and report["missing_keys"]:
        raise _no_causal_lm(saved_from.__name__, folder)
    _refuse_incomplete(model, report, str(folder))
    tell_of_code(model.config.to_dict())
    return model.to(place).eval()


def model_of(
    config: "Mapping[str, Any]", tensors: "dict[str, torch.Tensor]", model_class: Any = None
) -> Any:
    """The model of a raw `config.json` with tensors given by their names in a checkpoint.

    Args:
        config: the parsed `config.json`.
        tensors: by name.
        model_class: the class of transformers to build; the causal language model where None.

    Raises:
        CheckpointError: tensors of the class are missing or have another shape.
    """
    with quiet():
        settings = class_config(config)
        model, report = (model_class or plain_classes(settings)[0]).from_pretrained(
            None,
            config=settings,
            state_dict=tensors,
            dtype=next(iter(tensors.values())).dtype,
            experts_implementation="eager",  # grouped experts have no fp64 kernel
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _refuse_incomplete(model, report, config["model_type"])
    return model.eval()


def classes_of(config: "Mapping[str, Any]") -> list[Any]:
    """The classes of transformers that a checkpoint may be of, the likeliest first.

    The one that `architectures` names, or the causal language model; then the bare model, which
    has no head, as embedders are stored.

    Raises:
        CheckpointError: transformers cannot read the configuration.
    """
    settings = class_config(config)
    causal, bare = plain_classes(settings)
    return [*dict.fromkeys(each for each in (saved_class(settings) or causal, bare) if each)]


def check_causal_lm(config: "Mapping[str, Any]", names: "Iterable[str]", folder: Path) -> str:
    """Refuse a checkpoint that `load_model` would refuse for its head, before it is loaded.

    Args:
        config: the parsed `config.json`.
        names: of the tensors.
        folder: where they are.

    Returns:
        The name of the class that will be loaded.

    Raises:
        CheckpointError: it is a bare model, or has another head.
    """
    settings = class_config(config)
    (causal, bare), saved_from = plain_classes(settings), saved_class(settings)
    headless = saved_from is bare and not settings.get_text_config().tie_word_embeddings
    if headless and any(name.startswith(_OUTPUT_HEADS) for name in names):
        headless = False
    if saved_from not in (None, causal, bare) or (saved_from is not None and headless):
        raise _no_causal_lm(saved_from.__name__, folder)
    return type(settings).__name__ if causal is None else str(causal.__name__)


def saved_class(settings: Any) -> Any:
    """The class that `architectures` names, if it is one of transformers for this configuration."""
    import transformers

    names = settings.architectures
    for name in names if isinstance(names, list) else []:
        found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and found.config_class is type(settings):
            return found
    return None


def plain_classes(settings: Any) -> tuple[Any, Any]:
    """The causal language model of a configuration object, and its bare model; None for none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    kind = type(settings)
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None), MODEL_MAPPING.get(kind, None)


def class_config(config: "Mapping[str, Any]") -> Any:
    """The configuration object that transformers makes of a raw `config.json`.

    Raises:
        CheckpointError: it makes none.
    """
    from transformers import AutoConfig

    with scratch_folder() as folder:
        own = {key: value for key, value in config.items() if key != AUTO_MAP}
        Path(folder, "config.json").write_text(json.dumps(own), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except UNLOADABLE as error:
            raise _refused(error, f"config.json of a {config.get('model_type')!r}") from error


def _refused(error: Exception, where: str) -> CheckpointError:
    return CheckpointError(
        f"transformers {version('transformers')} refuses the configuration: {said(error)}",
        where=where,
        fix="`upcycle inspect` says what is in the folder",
    )


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """A checkpoint's own tokenizer.

    Raises:
        CheckpointError: the folder has none that loads without remote code.
    """
    from transformers import AutoTokenizer

    try:
        with under_utf8_name(folder) as named:
            return AutoTokenizer.from_pretrained(
                named, local_files_only=True, trust_remote_code=False
            )
    except StrictDataclassError as error:  # it reads the configuration too
        raise _refused(error, str(folder)) from error
    except UNLOADABLE as error:
        raise CheckpointError(
            f"the tokenizer does not load: {said(error)}",
            where=str(folder),
            fix="put the tokenizer's files beside the weights",
        ) from error


def _refuse_incomplete(model: Any, report: "Mapping[str, Any]", where: str) -> None:
    absent = [*sorted(report["missing_keys"]), *sorted(n for n, *_ in report["mismatched_keys"])]
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensors of {type(model).__name__} are missing or have another shape, "
            f"such as {absent[0]}",
            where=where,
            fix="fetch or convert the checkpoint again",
        )


def _no_causal_lm(saved_from: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is of {saved_from}, which predicts no tokens",
        where=f"{folder}, architectures in config.json",
        fix="give a causal language model here; convert, verify, plan, inspect and predict take "
        "this one too",
    )


def said(error: Exception) -> str:
    """An error of transformers on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def choose_device(name: str) -> str:
    """The device of that name; "auto" takes the best one that this machine has.

    Raises:
        DeviceError: an unknown name, or a device that this machine lacks.
    """
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    usable = [kind for kind, there in available.items() if there]  # best first
    if name == "auto":
        return usable[0]
    if name not in usable:
        raise DeviceError(
            f"device {name!r} is not available",
            where="device",
            fix=f"choose one of {', '.join(['auto', *usable])}",
        )
    return name


@contextmanager
def quiet() -> "Iterator[None]":
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
