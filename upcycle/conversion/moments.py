"""Run calibration text through a checkpoint and collect the moments of each layer's attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from upcycle.conversion.layer_stream import LayerStream
from upcycle.heads.moments import LayerMoments, MomentCollector
from upcycle.models.observed_attention import AttentionCall, Observer
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
        CheckpointError: tensors of the class are missing, have another shape or are not finite.
        FamilyError: the class's attention has a feature that is not expressed here.
    """
    for index in range(start, stream.num_layers):
        moments = advance_counting(stream, index, hidden, attended_heads=attended_heads)
        watch(Progress("calibrate", index + 1, stream.num_layers, "layers"))
        if moments is not None:
            yield index, moments


def advance_counting(
    stream: LayerStream,
    index: int,
    hidden: Tensor,
    observer: Observer | None = None,
    *,
    attended_heads: int = 0,
) -> LayerMoments | None:
    """Replace hidden states by a layer's output; its attention's moments, None without attention.

    Args:
        stream: the source's layers.
        index: which layer.
        hidden: [B, T, D] what it gets; overwritten.
        observer: told every call of its attention too.
        attended_heads: see `calibrate`.

    Raises:
        CheckpointError: tensors of the class are missing, have another shape or are not finite.
        FamilyError: the class's attention has a feature that is not expressed here.
    """
    stream.refuse_nonfinite(index)
    with stream.layer(index) as layer:
        if layer.attention is None:
            layer.advance(hidden)
            return None
        weights = stream.resident_weights(layer)
        collector = MomentCollector(weights, attended_heads=attended_heads)
        count = _counting(collector)

        def observe(call: AttentionCall) -> None:
            count(call)
            if observer is not None:
                observer(call)

        layer.advance(hidden, observe)
    return collector.moments()


def _counting(collector: MomentCollector) -> Observer:
    """An observer that hands the calls of an attention to a collector.

    Attended values are left out where a class does not show its probabilities (Falcon).
    """

    def count(call: AttentionCall) -> None:
        collector.add(call.inputs.flatten(0, 1))
        if call.scores is None or not collector.attended_heads:
            return
        heads = range(call.scores.query.shape[1])
        for row, x in enumerate(call.inputs):
            probabilities = [call.scores.row(row).probabilities(head)[0] for head in heads]
            collector.add_attended(x, torch.stack(probabilities))

    return count
