"""Load tensors without data into a class without weights, to see which names and shapes fit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from upcycle.errors import CheckpointError
from upcycle.models.loading import UNLOADABLE, class_config, quiet, said, saved_class

_DTYPE = torch.bfloat16  # no number is ever stored


def load_without_data(
    config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """What transformers reports of a checkpoint of these shapes, as fields of `ClassFit`.

    Args:
        config: a raw `config.json`.
        tensors: shapes by the names in the files.

    Raises:
        CheckpointError: transformers refuses the configuration.
    """
    with _refusals():
        return _report(_model(config), tensors)


def model_without_data(config: Mapping[str, Any]) -> Any:
    """The model that a raw `config.json` is of, on the "meta" device.

    Raises:
        CheckpointError: transformers refuses the configuration.
    """
    with _refusals():
        model = _model(config)
        model.tie_weights()
        return model


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        with quiet():
            yield
    except UNLOADABLE as error:
        raise CheckpointError(
            f"transformers {transformers.__version__} makes no model of the configuration: "
            f"{said(error)}",
            where="config.json",
            fix="give the numbers that the model was made with",
        ) from error


def _model(config: Mapping[str, Any]) -> Any:
    settings = class_config(config)
    model_class = saved_class(settings) or MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(settings)


def _report(model: Any, tensors: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    empty = {
        name: torch.empty(tuple(shape), dtype=_DTYPE, device="meta")
        for name, shape in tensors.items()
    }
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    report, _ = convert_and_load_state_dict_in_model(
        model,
        empty,
        load_config=LoadStateDictConfig(
            dtype=_DTYPE,
            device_map={"": "meta"},
            weight_mapping=get_model_conversion_mapping(model),
            ignore_mismatched_sizes=True,
        ),
    )
    model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(report)
    mismatched = {name: [list(here), list(there)] for name, here, there in report.mismatched_keys}
    # What could not even be put together (unequal experts) is there, but not in this shape.
    unjoined = set(report.conversion_errors) - set(mismatched)
    missing = report.missing_keys - unjoined - set(mismatched)
    return {
        "model_class": type(model).__name__,
        "missing": {name: wanted.get(name, []) for name in sorted(missing)},
        "unexpected": {
            name: list(tensors.get(name, [])) for name in sorted(report.unexpected_keys)
        },
        "mismatched": {name: mismatched[name] for name in sorted(mismatched)},
        "unjoined": {name: wanted.get(name, []) for name in sorted(unjoined)},
    }
