"""What each number of KV heads would cost, layer by layer, before converting."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.calibration import text_rows
from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.moments import calibrate
from upcycle.conversion.own_text import own_text_once
from upcycle.families.implied import shape_in
from upcycle.families.retargets.view import retargeted
from upcycle.heads.residuals import LayerResiduals, Residual
from upcycle.models.loading import choose_device
from upcycle.options.convert import MergeOptions
from upcycle.planning import planned_sizes
from upcycle.progress import Watcher, ignore


@dataclass(frozen=True)
class LayerPrediction:
    """One layer.

    Attributes:
        layer: its number.
        residuals: what is lost of its keys and values, by the number of KV heads.
    """

    layer: int
    residuals: dict[int, Residual]


@dataclass(frozen=True)
class Prediction:
    """What each number of KV heads leaves of keys and values.

    Attributes:
        tokens: how many tokens of text it was measured on.
        kv_heads: the numbers that merge, most heads first.
        layers: one entry for each layer with attention.
    """

    tokens: int
    kv_heads: tuple[int, ...]
    layers: tuple[LayerPrediction, ...]

    def mean(self, kv_heads: int) -> Residual:
        """The mean over the layers."""
        found = [layer.residuals[kv_heads] for layer in self.layers]
        total = sum(found, Residual(0.0, 0.0))
        return Residual(total.keys / len(found), total.values / len(found))

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON-serialisable data."""
        means = {kv_heads: asdict(self.mean(kv_heads)) for kv_heads in self.kv_heads}
        return {**asdict(self), "mean": means}


def predict(
    source: str | Path,
    options: MergeOptions,
    *,
    watch: Watcher = ignore,
) -> Prediction:
    """Measure on text what merging to each number of KV heads would lose, with one layer in memory.

    The numbers are the energy that the closed forms of `lowrank` leave, as fractions of the layer's
    own: of keys as its queries weigh them, and of values as its output projection weighs them.

    A source with one KV head has nothing to merge: the prediction is empty, and no text is read.

    Args:
        source: a checkpoint folder, a Hub cache snapshot, or a Hub id.
        options: their calibration text, its tokens and windows, seed and device count.
        watch: told the layers that are done.

    Raises:
        CheckpointError: the source is damaged or contradicts itself, or a weight is not finite.
        DeviceError: this machine lacks the device.
        FamilyError: the attention of the source is not supported.
        DataError: the text cannot be read, or there is too little of it.
    """
    place = choose_device(options.device)
    opened = Checkpoint.open(source)
    checkpoint = retargeted(opened)
    shape = shape_in(checkpoint)
    planned_sizes(checkpoint)  # checks every attention tensor
    choices = [g for g in shape.valid_kv_heads if g < shape.num_key_value_heads]
    if not choices:
        return Prediction(0, (), ())
    with own_text_once(options, opened) as reading:
        rows = text_rows(reading, checkpoint)
    stream = LayerStream(checkpoint, rows.shape[1], device=place)
    layers = []
    for layer, moments in calibrate(stream, stream.embed(rows), watch=watch):
        residuals = LayerResiduals(stream.attention_weights(layer), moments)
        found = {g: residuals.of_groups(g) for g in reversed(choices)}
        layers.append(LayerPrediction(layer, found))
    return Prediction(rows.numel(), tuple(reversed(choices)), tuple(layers))
