"""Merge a model's attention, layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from upcycle.checkpoint.headers import TORCH_DTYPES
from upcycle.checkpoint.nonfinite import NonfiniteScan
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError
from upcycle.families import Family, Role
from upcycle.families.retargets.view import RetargetedCheckpoint
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.pool import repeat
from upcycle.planning import Plan, planned_family

_ALIGNMENT = 64  # bytes; of any dtype, and a cache line


WITHOUT_TEXT = "mean"  # merges by weights alone, whatever the layout


def by_weights_alone(todo: Plan) -> Plan:
    """The plan as it is carried out for attention outside the decoder's layers.

    transformers does not run it, so that no text can be measured there.
    """
    return replace(todo, method=WITHOUT_TEXT) if get_method(todo.method).needs_calibration else todo


def merge_layer(
    checkpoint: Checkpoint, family: Family, todo: Plan, layer: int
) -> dict[Role, Tensor]:
    """Read one layer's attention, bring it to the plan's number of KV heads, and lay it out."""
    names = family.tensor_names(layer, todo.source_shape)
    return _merge(family, todo, layer, {role: checkpoint.read(n) for role, n in names.items()})


class Merger(Protocol):
    """Where the files get the tensors of merged layers from, asked by several threads."""

    def names(self, layer: int) -> list[str]:
        """The source's tensors that a layer is made from."""

    def changed(self, layer: int) -> dict[Role, Tensor]:
        """The layer's new tensors; those that are left out are the source's."""

    def kept(self, layer: int, role: Role) -> Iterator[bytes]:
        """The bytes of a tensor that `changed` left out."""


class LayerMerger:
    """Merges layers for files that are written side by side, one layer in memory at a time.

    Args:
        checkpoint: the source.
        todo: what is made of it.
        allow_nonfinite: merge NaN and infinity instead of refusing them.
    """

    def __init__(self, checkpoint: Checkpoint, todo: Plan, *, allow_nonfinite: bool) -> None:
        self._checkpoint = checkpoint
        self._plan = todo
        self._family = planned_family(checkpoint, todo)
        lowers = todo.num_key_value_heads < todo.source_shape.num_key_value_heads
        self._must_be_finite = lowers and not allow_nonfinite  # repeated heads are copies
        self._only_kv = not lowers or get_method(todo.method).only_kv
        self._one_at_a_time = Lock()
        # Every layer is read to the same place: fresh memory costs as much as the reading.
        self._memory = torch.empty(0, dtype=torch.uint8)

    def names(self, layer: int) -> list[str]:
        """The source's tensors that a layer is made from."""
        return list(self._family.tensor_names(layer, self._plan.source_shape).values())

    def changed(self, layer: int) -> dict[Role, Tensor]:
        """The layer's new tensors but those whose bytes are the source's, as q's are for `mean`.

        Raises:
            CheckpointError: a tensor to be merged is not finite.
        """
        with self._one_at_a_time:
            tensors = self._read(layer)
            # Pooling waits for memory: a second thread would take the other files' core.
            with _one_thread() if self._only_kv else nullcontext():
                merged = _merge(self._family, self._plan, layer, tensors)
            return {
                role: self._own(tensor)
                for role, tensor in merged.items()
                if role not in tensors
                or not (tensor.is_meta or _is_same_memory(tensor, tensors[role]))
            }

    def kept(self, layer: int, role: Role) -> Iterator[bytes]:
        """The bytes of a tensor that `changed` left out.

        Raises:
            CheckpointError: it is not finite, at its end.
        """
        return self._checked(self._family.tensor_names(layer, self._plan.source_shape)[role], layer)

    def _read(self, layer: int) -> dict[Role, Tensor]:
        """The layer's tensors, without numbers where the method leaves them alone."""
        names = self._family.tensor_names(layer, self._plan.source_shape)
        infos = {role: self._checkpoint.tensors[name] for role, name in names.items()}
        projections = self._family.projections
        unread = {
            role
            for role in projections.shapes(self._plan.source_shape)
            if self._only_kv and role.endswith(".weight") and role not in projections.kv_weights()
        }
        sizes = {role: 0 if role in unread else info.nbytes for role, info in infos.items()}
        total = sum(size + -size % _ALIGNMENT for size in sizes.values())
        if len(self._memory) < total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        begin, tensors = 0, {}
        for role, info in infos.items():
            dtype = getattr(torch, TORCH_DTYPES[info.dtype])
            if role in unread:
                tensors[role] = torch.empty(info.shape, dtype=dtype, device="meta")
                continue
            place = self._memory[begin : begin + sizes[role]]
            _fill(place.numpy(), self._checked(names[role], layer))
            tensors[role] = place.view(dtype).view(info.shape)
            begin += sizes[role] + -sizes[role] % _ALIGNMENT
        return tensors

    def _checked(self, name: str, layer: int) -> Iterator[bytes]:
        """A tensor's bytes; at their end it is known whether all were finite."""
        info = self._checkpoint.tensors[name]
        scan = NonfiniteScan(info.dtype)
        for chunk in self._checkpoint.chunks(name):
            if self._must_be_finite:
                scan.update(chunk)
            yield chunk
        if scan.first is not None:
            position = [int(i) for i in np.unravel_index(scan.first, info.shape)]
            raise CheckpointError(
                f"{self._made_from(name)} of layer {layer} has {scan.count} values that are NaN "
                f"or infinite, the first at {position}",
                where=f"{self._checkpoint.folder / info.shard}, {self._made_from(name)}",
                fix="fetch the weights again, or pass --allow-nonfinite to merge them anyway",
            )

    def _made_from(self, name: str) -> str:
        """The tensor on disk that a user knows."""
        if isinstance(self._checkpoint, RetargetedCheckpoint):
            return self._checkpoint.made[name].sources[0].name
        return name

    def _own(self, tensor: Tensor) -> Tensor:
        """The tensor, apart from the memory that the next layer is read to."""
        shared = tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
        return tensor.clone() if shared else tensor


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from sharing the work out among threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fill(place: "np.ndarray[tuple[int], np.dtype[np.uint8]]", chunks: Iterator[bytes]) -> None:
    begin = 0
    for chunk in chunks:
        place[begin : begin + len(chunk)] = np.frombuffer(chunk, np.uint8)
        begin += len(chunk)


def _merge(
    family: Family, todo: Plan, layer: int, tensors: dict[Role, Tensor]
) -> dict[Role, Tensor]:
    weights = family.read(tensors, todo.source_shape)
    if todo.num_key_value_heads > todo.source_shape.num_key_value_heads:
        return family.write(repeat(weights, todo.num_key_value_heads))
    request = MergeRequest(
        num_key_value_heads=todo.num_key_value_heads,
        layer=layer,
        seed=todo.seed,
        initializer_range=todo.initializer_range,
    )
    return family.write(get_method(todo.method).merge(weights, request))


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are the very same numbers in memory, laid out alike."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and tensor.stride() == other.stride()
    )
