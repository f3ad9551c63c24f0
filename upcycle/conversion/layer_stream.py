"""Run a checkpoint through transformers' own class, one layer of weights in memory at a time."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import commonpath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from upcycle.attention import AttentionWeights
from upcycle.checkpoint.nonfinite import count_nonfinite
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.empty_model import EmptyModel
from upcycle.errors import CheckpointError, DataError
from upcycle.families import Role, family_in
from upcycle.memory import give_back_memory
from upcycle.models.loading import choose_device
from upcycle.models.observed_attention import (
    OBSERVED,
    AttentionCall,
    Observer,
    first_of,
    observed,
    register_observed_attention,
)

_ROWS_AT_ONCE = 4  # bounds the MLP's intermediate activations and the probabilities
_KEPT_CALLS = 2  # the usual number of rows, and the last one

Passed = tuple[tuple[Any, ...], Mapping[str, Any]]


class _Call(NamedTuple):
    """What a model calls a layer with."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class ResidentLayer:
    """A layer whose weights are in memory.

    Attributes:
        index: which layer of the model it is.
        module: the layer.
        attention: the attention in it, or None where the layer has none that can be converted.
        parameters: the attention's own, by the role that they are loaded from.
        device: where it is.
        passed: what the model passes beside the hidden states of so many rows.
        chunk_rows: how many rows `advance` runs at once.
    """

    index: int
    module: nn.Module
    attention: nn.Module | None
    parameters: Mapping[Role, nn.Parameter]
    device: str
    passed: Callable[[int], Passed]
    chunk_rows: int
    _passed_on: dict[int, Passed] = field(default_factory=dict)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output for hidden states [B, T, D] on its device."""
        arguments, keywords = self.passed(len(hidden))
        return first_of(self.module(hidden, *arguments, **keywords))

    def attend(self, inputs: Tensor) -> Tensor:
        """The attention's output for inputs [B, T, D] on its device, called as the layer does."""
        assert self.attention is not None
        rows = len(inputs)
        if rows not in self._passed_on:
            calls: list[AttentionCall] = []
            with observed(self.attention, calls.append), torch.no_grad():
                self.forward(torch.zeros_like(inputs))
            self._passed_on[rows] = calls[0].arguments, calls[0].keywords
        arguments, keywords = self._passed_on[rows]
        return first_of(self.attention(inputs, *arguments, **keywords))

    @torch.no_grad()
    def advance(self, hidden: Tensor, observer: Observer | None = None) -> None:
        """Replace hidden states [B, T, D] by the layer's output, a few rows at a time.

        Args:
            hidden: on any device; overwritten.
            observer: told every call of the attention, on the layer's device.
        """
        for rows in torch.split(hidden, self.chunk_rows):
            moved = rows.to(self.device)
            if observer is None or self.attention is None:
                rows.copy_(self.forward(moved))
            else:
                with observed(self.attention, observer):
                    rows.copy_(self.forward(moved))


class LayerStream:
    """A checkpoint's layers, each loaded when its turn comes and dropped after it.

    What the model passes to its layers beside hidden states (masks, rotary angles, ALiBi) depends
    on positions and on the number of rows alone, as rows are full and there is no cache. It is
    recorded once for each number of rows that runs: a class may fold the rows into any axis.

    Attributes:
        num_layers: layers of the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sequence_length: int,
        *,
        device: str = "auto",
        dtype: torch.dtype = torch.float32,
        chunk_rows: int = _ROWS_AT_ONCE,
    ) -> None:
        """Build the model without its layers.

        Args:
            checkpoint: as opened, or a retargeted view.
            sequence_length: T, tokens of every row.
            device: see `choose_device`.
            dtype: of weights, computation and hidden states.
            chunk_rows: how many rows go through a layer at once.

        Raises:
            CheckpointError: tensors of the class are missing or have another shape.
            DeviceError: this machine lacks the device.
            FamilyError: no attention of the checkpoint can be converted.
        """
        register_observed_attention()
        self._checkpoint = checkpoint
        self._device = choose_device(device)
        self._dtype = dtype
        self._chunk_rows = chunk_rows
        self._model = EmptyModel(checkpoint, dtype=dtype, device=self._device, attention=OBSERVED)
        self._files: dict[str, list[str]] = {}
        for file, memory in self._model.in_memory(checkpoint.tensors).items():
            self._files.setdefault(memory, []).append(file)
        self._family = family_in(checkpoint)
        self._shape = self._family.shape(checkpoint.config)
        self._attention = self._attention_paths()
        some_layer, path = next(iter(self._attention.items()))
        # "model.layers" of "model.layers.3.self_attn"
        self._layers_path = re.split(rf"\.{some_layer}(?=\.)", path)[0]
        self._layers: Any = self._model.model.get_submodule(self._layers_path)
        self._base_path = self._layers_path.rpartition(".")[0]
        self._base: Any = self._model.model.get_submodule(self._base_path)
        self.num_layers = len(self._layers)
        table = self._base.get_input_embeddings()
        modules = self._model.model.named_modules()
        self._embedding = next(f"{name}.weight" for name, module in modules if module is table)
        self._load_outside()
        self._row = (sequence_length, self._model.model.config.hidden_size)
        self._passed: dict[int, list[Passed]] = {}

    def embed(self, ids: Tensor) -> Tensor:
        """The hidden states that the first layer gets.

        Args:
            ids: [B, T] token ids.

        Returns:
            [B, T, D] on the CPU.

        Raises:
            CheckpointError: there is no embedding, or the text uses rows that are not finite.
            DataError: an id beyond the embedding.
        """
        files = self._files.get(self._embedding)
        if files is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {self._embedding}",
                where=str(self._checkpoint.folder),
                fix="fetch or convert the checkpoint again",
            )
        stored = self._checkpoint.read(files[0])
        # Only the rows that the text uses: an embedding may be larger than any layer.
        used, compact = torch.unique(ids, return_inverse=True)
        if used[-1] >= len(stored):
            raise DataError(
                f"the text has token {int(used[-1])}, the model's embedding {len(stored)} rows",
                where=str(self._checkpoint.folder),
                fix="put the tokenizer that the model was trained with beside its weights",
            )
        rows = stored[used].to(self._device, self._dtype)
        del stored
        self._refuse_nonfinite(files[0], int((~rows.isfinite()).sum()))  # unused rows may be
        module = self._base.get_input_embeddings()
        padding, module.padding_idx = module.padding_idx, None
        module.weight = nn.Parameter(rows)
        del rows
        chunks = [
            self._record(input_ids=rows.to(self._device))[0].hidden.cpu()
            for rows in torch.split(compact, self._chunk_rows)
        ]
        module.padding_idx = padding
        self._model.drop([self._embedding])
        give_back_memory()
        return torch.cat(chunks)

    def layers(self, start: int = 0) -> Iterator[ResidentLayer]:
        """Each layer from `start` on, in memory until the next one is asked for."""
        for index in range(start, self.num_layers):
            with self.layer(index) as resident:
                yield resident

    @contextmanager
    def layer(
        self, index: int, replaced: Mapping[str, Tensor] | None = None
    ) -> Iterator[ResidentLayer]:
        """One layer, in memory while the context lasts.

        Args:
            index: which layer.
            replaced: tensors that stand for the files' own of the same names.

        Raises:
            CheckpointError: tensors of the class are missing or have another shape.
        """
        prefix = f"{self._layers_path}.{index}."
        part = [name for name in self._model.parameters if name.startswith(prefix)]
        files = self._layer_files(prefix)
        parameters: dict[Role, nn.Parameter] = {}
        give_back_memory()  # of whatever was done since the layer before
        try:
            self._model.load(part, {*files, *(replaced or {})}, replaced)
            path = self._attention.get(index)
            if path is not None:
                parameters.update(self._attention_parameters(index))
            yield ResidentLayer(
                index=index,
                module=self._layers[index],
                attention=None if path is None else self._model.model.get_submodule(path),
                parameters=parameters,
                device=self._device,
                passed=lambda rows: self._passed_to_layers(rows)[index],
                chunk_rows=self._chunk_rows,
            )
        finally:
            parameters.clear()  # whoever keeps the layer keeps no weights
            self._model.drop(part)
            give_back_memory()

    def refuse_nonfinite(self, index: int) -> None:
        """Refuse a layer with a NaN or infinity in it, which would spread to all that is measured.

        Raises:
            CheckpointError: naming the tensor.
        """
        for name in self._layer_files(f"{self._layers_path}.{index}."):
            self._refuse_nonfinite(name, count_nonfinite(self._checkpoint, name))

    def attention_weights(self, index: int) -> AttentionWeights:
        """A layer's attention in canonical form, as it is stored."""
        names = self._family.tensor_names(index, self._shape)
        tensors = {role: self._checkpoint.read(name) for role, name in names.items()}
        return self._family.read(tensors, self._shape)

    def resident_weights(self, layer: ResidentLayer) -> AttentionWeights:
        """A layer's attention in canonical form, in the stream's dtype and on its device.

        It shares the memory of the layer, but for tensors that transformers keeps in another form.
        """
        tensors: dict[Role, Tensor] = {}
        for role, name in self._family.tensor_names(layer.index, self._shape).items():
            stored = self._checkpoint.read(name).to(self._device, self._dtype)
            resident = layer.parameters[role].detach()
            tensors[role] = resident if torch.equal(resident, stored) else stored
        return self._family.read(tensors, self._shape)

    def _layer_files(self, prefix: str) -> list[str]:
        """The tensors in the files that a part of the model is made from."""
        return [
            file
            for memory, names in self._files.items()
            if memory.startswith(prefix)
            for file in names
        ]

    def _refuse_nonfinite(self, name: str, count: int) -> None:
        if count:
            raise CheckpointError(
                f"{name} has values that are NaN or infinite ({count:,})",
                where=f"{self._checkpoint.folder}, {name}",
                fix="fetch the weights again; calibration needs finite ones",
            )

    def _attention_parameters(self, index: int) -> dict[Role, nn.Parameter]:
        names = self._family.tensor_names(index, self._shape)
        memory = self._model.in_memory(names.values())
        return {role: self._model.model.get_parameter(memory[n]) for role, n in names.items()}

    def _load_outside(self) -> None:
        """Load what is neither a layer nor the embedding nor the head."""
        part = [
            name
            for name in self._model.parameters
            if name.startswith(f"{self._base_path}.")
            and not name.startswith(f"{self._layers_path}.")
            and name != self._embedding
        ]
        self._model.load(part, [file for name in part for file in self._files.get(name, [])])

    def _passed_to_layers(self, rows: int) -> list[Passed]:
        """What each layer gets beside the hidden states of so many rows."""
        if rows not in self._passed:
            zero = torch.zeros((), dtype=self._dtype, device=self._device)
            calls = self._record(inputs_embeds=zero.expand(rows, *self._row))
            while len(self._passed) >= _KEPT_CALLS:  # masks can be large
                del self._passed[[*self._passed][-1]]
            self._passed[rows] = [(call.arguments, call.keywords) for call in calls]
        return self._passed[rows]

    def _record(self, **inputs: Tensor) -> list[_Call]:
        """Run the model with layers that do nothing: what each was called with."""
        calls = self._record_with(lambda hidden: hidden, inputs)
        if calls[-1].hidden.shape != calls[0].hidden.shape:
            # This class takes the first of what a layer returns.
            calls = self._record_with(lambda hidden: (hidden,), inputs)
        return calls

    @torch.no_grad()
    def _record_with(
        self, returned: Callable[[Tensor], Any], inputs: Mapping[str, Tensor]
    ) -> list[_Call]:
        calls: list[_Call] = []

        def stand_in(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
            calls.append(_Call(hidden, arguments, keywords))
            return returned(hidden)

        for layer in self._layers:
            layer.forward = stand_in
        try:
            self._base(**inputs, use_cache=False)
        finally:
            for layer in self._layers:
                del layer.forward
        return calls

    def _attention_paths(self) -> dict[int, str]:
        """The name in memory of each layer's attention."""
        paths = {}
        for layer in self._shape.attention_layers:
            names = self._family.tensor_names(layer, self._shape).values()
            files = (name.replace(".", "/") for name in self._model.in_memory(names).values())
            paths[layer] = commonpath(files).replace("/", ".")
        return paths
