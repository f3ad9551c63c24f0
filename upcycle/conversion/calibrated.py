"""Convert a model's attention by calibration text, in one pass over its layers.

Two streams of hidden states run side by side, the source's and that of what has been converted so
far. Each layer is merged by the moments of the source's, then fitted (where that is asked for) to
make up, on the activations that it will really get, for what the layers before it have lost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.layer_stream import LayerStream, ResidentLayer
from upcycle.conversion.moments import advance_counting
from upcycle.conversion.refine import Lesson, Refinement, Run, multiplies_bf16, refine
from upcycle.errors import FamilyError
from upcycle.families import Role, family_in
from upcycle.heads.grouping import search_groups
from upcycle.heads.methods import MergeRequest, MergeSteps, get_method
from upcycle.heads.moments import LayerMoments
from upcycle.heads.permute import permute_kv_heads
from upcycle.heads.residuals import LayerResiduals, Residual
from upcycle.models.observed_attention import AttentionCall, observed
from upcycle.planning import Plan
from upcycle.progress import Progress, Watcher, ignore

_SAME = 1e-3  # relative difference of two outputs that count as equal
_SMALLEST = 1e-12


@dataclass(frozen=True)
class LayerReport:
    """What was done to a layer, and what it cost.

    Attributes:
        layer: which layer of the model it is.
        keys: what the method did to keys; its name where it does the same to all layers.
        values: the same for values.
        order: the source's KV heads in the order in which contiguous groups of them share one.
        residual: what no shared head can carry.
        refinement: what the fit reached, or None where there was none.
    """

    layer: int
    keys: str
    values: str
    order: tuple[int, ...]
    residual: Residual
    refinement: Refinement | None = None


@dataclass(frozen=True)
class MergedLayer:
    """A merged layer.

    Attributes:
        layer: which layer of the model it is.
        tensors: the attention's new tensors by role, in the dtypes that are stored.
        report: what was done.
    """

    layer: int
    tensors: Mapping[Role, Tensor]
    report: LayerReport


class CalibratedConversion:
    """The two streams, and the layers made of them.

    Args:
        checkpoint: as opened, or a retargeted view.
        todo: a plan that lowers the number of KV heads.
        rows: [B, T] token ids, see `calibration_rows`.
        refine_steps: of the optimiser, for each layer; 0 for none.
        refine_precision: see `ConvertOptions`.
        search: whether to search which heads share one, instead of neighbours.
        device: where layers run.

    Raises:
        CheckpointError: tensors of the class are missing or have another shape.
        FamilyError: the class's attention has a feature that is not expressed here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        todo: Plan,
        rows: Tensor,
        *,
        refine_steps: int = 0,
        refine_precision: str = "fp32",
        search: bool = False,
        device: str = "auto",
    ) -> None:
        assert todo.num_key_value_heads < todo.source_shape.num_key_value_heads
        self._checkpoint = checkpoint
        self._plan = todo
        self._family = family_in(checkpoint)
        self._method = get_method(todo.method)
        self._steps = refine_steps
        self._precision = refine_precision
        self._search = search
        self._next = 0
        self._source = LayerStream(checkpoint, rows.shape[1], device=device)
        self._hidden = {"source": self._source.embed(rows)}
        if refine_steps:
            # The other stream is of use to the fit alone.
            config: dict[str, Any] = {**checkpoint.config, **todo.config_edits}
            converted = replace(checkpoint, config=config)
            self._converted = LayerStream(converted, rows.shape[1], device=device)
            self._hidden["converted"] = self._hidden["source"].clone()

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """The next layer, and the hidden states [rows, T, D] that it gets.

        All that the rest depends on, by the model that they are of.
        """
        return self._next, self._hidden

    def restore(self, next_layer: int, hidden: Mapping[str, Tensor]) -> None:
        """Go on from a `state` of the same conversion.

        Args:
            next_layer: the first that is still to be merged.
            hidden: [rows, T, D] by model.
        """
        self._next = next_layer
        self._hidden = dict(hidden)

    def layers(self, watch: Watcher = ignore) -> Iterator[MergedLayer]:
        """Each attention layer that is not made yet, in order.

        Args:
            watch: told the layers that are done, with fractions while one is being fitted.

        Raises:
            CheckpointError: a tensor is missing or not finite.
            DataError: refinement with one row, which leaves none to hold out.
            FamilyError: refinement of a class that has its attention in other tensors than files.
        """
        for index in range(self._next, self._source.num_layers):
            # What the attention's output will have to make up for, first; then with it.
            gap = self._hidden["source"] - self._hidden["converted"] if self._steps else None
            merged = self._merge(index, gap)
            if gap is not None:
                merged = self._advance_converted(index, merged, gap, watch)
            del gap  # here and below: before the next layer's weights come
            self._next = index + 1
            self._tell(watch, self._next)
            if merged is not None:
                yield merged
            del merged

    def _tell(self, watch: Watcher, done: float, note: str = "") -> None:
        watch(Progress("calibrate", done, self._source.num_layers, "layers", note))

    def _merge(self, index: int, gap: Tensor | None) -> MergedLayer | None:
        """Run the source's layer, add its attention's output to the gap, and merge it."""
        done = 0

        def add_output(call: AttentionCall) -> None:
            nonlocal done
            if gap is not None:
                rows = gap[done : done + len(call.output)]
                rows.add_(call.output.to(rows.device))
                done += len(rows)

        moments = advance_counting(self._source, index, self._hidden["source"], add_output)
        return None if moments is None else self._merge_by(index, moments)

    def _merge_by(self, index: int, moments: LayerMoments) -> MergedLayer:
        todo, groups = self._plan, self._plan.num_key_value_heads
        weights = self._source.attention_weights(index)
        residuals = LayerResiduals(weights, moments)
        order = list(range(weights.num_key_value_heads))
        if self._search:
            order = search_groups(residuals.cost, len(order), groups, seed=todo.seed)
        residual = residuals.of_groups(groups, order)
        del residuals  # has moments of its own
        if self._search:
            weights, moments = permute_kv_heads(weights, order), moments.select(order)
        request = MergeRequest(
            num_key_value_heads=groups,
            layer=index,
            seed=todo.seed,
            initializer_range=todo.initializer_range,
            moments=moments,
        )
        steps = MergeSteps(todo.method, todo.method)
        if self._method.steps is not None:
            steps = self._method.steps(weights)
        report = LayerReport(
            layer=index,
            keys=steps.keys,
            values=steps.values,
            order=tuple(order),
            residual=residual,
        )
        tensors = self._family.write(self._method.merge(weights, request))
        return MergedLayer(index, tensors, report)

    def _advance_converted(
        self, index: int, merged: MergedLayer | None, target: Tensor, watch: Watcher
    ) -> MergedLayer | None:
        """Fit the merged layer, and run it."""
        names = self._family.tensor_names(index, self._plan.target_shape)
        tensors = {} if merged is None else merged.tensors
        replaced = {names[role]: tensor for role, tensor in tensors.items()}
        with self._converted.layer(index, replaced) as layer:
            if merged is not None:
                refinement = self._fit(layer, target, tensors, watch)
                tensors = {
                    role: layer.parameters[role].detach().cpu().to(tensor.dtype)
                    for role, tensor in tensors.items()
                }
                report = replace(merged.report, refinement=refinement)
                merged = MergedLayer(index, tensors, report)
            layer.advance(self._hidden["converted"])
        return merged

    def _fit(
        self,
        layer: ResidentLayer,
        target: Tensor,
        tensors: Mapping[Role, Tensor],
        watch: Watcher,
    ) -> Refinement:
        """Fit the attention's output; or the layer's, where that is not a sum with it."""
        assert layer.attention is not None
        if any(layer.parameters[role].shape != tensor.shape for role, tensor in tensors.items()):
            raise FamilyError(
                "transformers takes this model's attention tensors apart when it loads them",
                where=f"model_type {self._plan.model_type}",
                fix="convert it without --refine",
            )
        source, hidden = self._hidden["source"], self._hidden["converted"]
        run: Run
        if adds_attention(layer, hidden[:1].to(layer.device)):
            run, inputs = layer.attend, _attention_inputs(layer, hidden)
        else:
            run, inputs, target = layer.forward, hidden, source

        def tell(step: int, error: float) -> None:
            self._tell(watch, layer.index + step / self._steps, f"error {error:.2%}")

        # The next norm divides by the size of a token's hidden state: so does its error.
        energies = [row.square().mean(-1) for row in source]
        weights = 1 / torch.stack(energies).clamp_min(_SMALLEST)
        return refine(
            run,
            layer.parameters,
            Lesson(inputs, target, weights),
            steps=self._steps,
            seed=self._plan.seed * 1_000_003 + layer.index,
            device=layer.device,
            dtypes={role: tensor.dtype for role, tensor in tensors.items()},
            in_bf16=self._precision == "bf16"
            or (self._precision == "auto" and multiplies_bf16(layer.device)),
            tell=tell,
        )


@torch.no_grad()
def _attention_inputs(layer: ResidentLayer, hidden: Tensor) -> Tensor:
    """What a layer's attention gets for hidden states [B, T, D]."""
    assert layer.attention is not None
    calls: list[AttentionCall] = []
    inputs = torch.empty_like(hidden)
    with observed(layer.attention, calls.append):
        for rows, own in zip(
            torch.split(hidden, layer.chunk_rows),
            torch.split(inputs, layer.chunk_rows),
            strict=True,
        ):
            layer.forward(rows.to(layer.device))
            own.copy_(calls.pop().inputs)
    return inputs


@torch.no_grad()
def adds_attention(layer: ResidentLayer, hidden: Tensor) -> bool:
    """Whether a layer adds its attention's output to its hidden states before all else.

    Then, and only then, a shift of one is a shift of the other. It is not where the output is
    scaled or normalised first, or where the MLP reads the hidden states beside it.

    Args:
        layer: with attention.
        hidden: [1, T, D] some hidden states.
    """
    assert layer.attention is not None
    calls: list[AttentionCall] = []
    with observed(layer.attention, calls.append):
        plain = layer.forward(hidden)
    output, shift = calls[0].output, hidden.roll(1, -1)

    def with_output(hidden: Tensor, output: Tensor) -> Tensor:
        def instead(_: nn.Module, __: Any, given: Any) -> Any:
            return (output, *given[1:]) if isinstance(given, tuple) else output

        assert layer.attention is not None
        hook = layer.attention.register_forward_hook(instead)
        try:
            return layer.forward(hidden)
        finally:
            hook.remove()

    one, other = with_output(hidden + shift, output), with_output(hidden, output + shift)
    return bool((one - other).norm() <= _SAME * (one - plain).norm())
