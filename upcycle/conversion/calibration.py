"""Run calibration text through a checkpoint and collect the moments of each layer's attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from upcycle.conversion.layer_stream import LayerStream
from upcycle.conversion.observed_attention import AttentionCall
from upcycle.errors import FamilyError
from upcycle.heads.moments import LayerMoments, MomentCollector
from upcycle.progress import Progress, Watcher, ignore


def calibrate(
    stream: LayerStream,
    hidden: Tensor,
    *,
    start: int = 0,
    attended_heads: int = 0,
    watch: Watcher = ignore,
) -> Iterator[tuple[int, LayerMoments]]:
    """The moments of each attention layer from `start` on, one layer in memory at a time.

    To resume later, keep `hidden` as it is when a layer's moments arrive and start with the next.

    Args:
        stream: the source's layers.
        hidden: [B, T, D] what layer `start` gets, from `LayerStream.embed` for layer 0; replaced
            by what the last layer gives.
        start: the first layer to run.
        attended_heads: of how many neighbouring KV heads the attended values are collected, see
            `MomentCollector`; 0 for none.
        watch: told the layers that are done.

    Raises:
        CheckpointError: tensors of the class are missing or have another shape.
        FamilyError: attended values are asked for, but the class computes attention in a way that
            hides its probabilities.
    """
    for index in range(start, stream.num_layers):
        collector = None
        with stream.layer(index) as layer:
            if layer.attention is None:
                layer.advance(hidden)
            else:
                weights = stream.attention_weights(index)
                collector = MomentCollector(weights, attended_heads=attended_heads)
                layer.advance(hidden, _Count(collector, attended=attended_heads > 0))
        watch(Progress("calibrate", index + 1, stream.num_layers, "layers"))
        if collector is not None:
            yield index, collector.moments()


class _Count:
    """Hands the calls of an attention to a collector."""

    def __init__(self, collector: MomentCollector, *, attended: bool) -> None:
        self._collector = collector
        self._attended = attended

    def __call__(self, call: AttentionCall) -> None:
        self._collector.add(call.inputs.flatten(0, 1))
        if not self._attended:
            return
        scores = call.scores
        if scores is None:
            raise FamilyError(
                "this class does not show its attention probabilities",
                where="calibration",
                fix="choose a method that does not need attended values",
            )
        heads = range(scores.query.shape[1])
        for row, x in enumerate(call.inputs):
            probabilities = [scores.row(row).probabilities(head)[0] for head in heads]
            self._collector.add_attended(x, torch.stack(probabilities))
