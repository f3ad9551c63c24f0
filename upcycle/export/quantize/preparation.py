"""Decide how every weight of a checkpoint is stored, before anything is converted."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.quantize.compression import compress
from upcycle.export.quantize.dequantise import dequantise_model
from upcycle.export.quantize.schemes import Quantization, Scheme, load_quantization
from upcycle.export.quantize.weights import (
    WeightMatrix,
    assign,
    bits_by_role,
    find_weights,
    is_tied,
    split_palettes,
    untie,
)
from upcycle.export.sensitivity import (
    Sensitivity,
    log_probabilities,
    mean_divergence,
    measure_sensitivity,
)
from upcycle.models.calibration_text import calibration_rows
from upcycle.models.loading import load_model
from upcycle.options.export import ExportOptions
from upcycle.progress import Watcher, ignore

_TOKENS = 512
_SEQUENCE_LENGTH = 256


@dataclass(frozen=True)
class Prepared:
    """What is stored how.

    Attributes:
        weights: all weights with a role, by name.
        schemes: of those that are quantised.
        untied: whether a tied output matrix was separated from the embedding.
        promoted: layers that get more bits.
        sensitivity: what the promotion rests on, where there is any.
        kl: mean KL(checkpoint || quantised checkpoint) on the same text, nats per token.
    """

    weights: Mapping[str, WeightMatrix]
    schemes: Mapping[str, Scheme]
    untied: bool = False
    promoted: tuple[int, ...] = ()
    sensitivity: Sensitivity | None = None
    kl: float | None = None

    def compress(self, model: Any) -> Any:
        """A converted function with these weights compressed; see `compression.compress`."""
        return compress(model, self.weights, self.schemes)

    def record(self) -> dict[str, Any]:
        """For the package's manifest and `--json`."""
        return {
            "roles": bits_by_role(self.weights.values(), self.schemes),
            "schemes": {
                name: scheme.model_dump(exclude_none=True) for name, scheme in self.schemes.items()
            },
            "untied": self.untied,
            "promoted": list(self.promoted),
            "sensitivity": asdict(self.sensitivity) if self.sensitivity else None,
            "kl": self.kl,
        }


def prepare_quantization(
    checkpoint: Checkpoint, options: ExportOptions, watch: Watcher = ignore
) -> Prepared:
    """Choose a scheme for every weight; with a promotion, by measuring on text.

    Args:
        checkpoint: what will be exported.
        options: of the export, with a scheme; the calibration text is only read for a promotion.
        watch: told of each measured layer.

    Raises:
        CheckpointError: the model or its tokenizer does not load.
        DataError: a text cannot be read, or there is too little of it.
        ExportError: the scheme does not suit the model.
    """
    assert options.quantize is not None
    quantization = load_quantization(options.quantize)
    model = load_model(checkpoint.folder, dtype=torch.float32)
    if options.untie:
        if not is_tied(model):
            raise ExportError(
                "the output matrix is not tied to the embedding",
                where="--untie",
                fix="omit --untie; both have their own scheme already",
            )
        untie(model)
    weights = {weight.name: weight for weight in find_weights(model)}

    def assigned(promoted: Collection[int] = ()) -> dict[str, Scheme]:
        schemes = assign(quantization, weights.values(), promoted)
        return split_palettes(schemes, weights, options.split_head)

    schemes = assigned()
    if options.untie:
        _check_untied(quantization)
    if quantization.promote is None:
        return Prepared(weights, schemes, options.untie)
    rows = calibration_rows(
        checkpoint,
        options.calibration,
        tokens=_TOKENS,
        sequence_length=_SEQUENCE_LENGTH,
        option=None,
    )
    sensitivity = measure_sensitivity(model, weights, schemes, rows, watch)
    promoted = sensitivity.ranking[: quantization.promote.count]
    schemes = assigned(promoted)
    with torch.inference_mode():
        reference = log_probabilities(model, rows)
        dequantise_model(model, weights, schemes)
        kl = mean_divergence(reference, log_probabilities(model, rows))
    return Prepared(weights, schemes, options.untie, promoted, sensitivity, kl)


def _check_untied(quantization: Quantization) -> None:
    """Equal numbers in equal form are one constant again, as coremltools has it."""
    if quantization.embedding == quantization.lm_head:
        raise ExportError(
            f"the embedding and the output matrix would both be {quantization.lm_head or 'fp16'}",
            where="--untie",
            fix="omit --untie, or give lm_head and embedding different schemes in a YAML "
            "file given to --quantize",
        )
