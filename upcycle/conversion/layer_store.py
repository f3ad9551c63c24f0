"""Layers that were merged ahead of the files they go into, kept on disk so that a run can go on."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from upcycle.checkpoint.reader import Checkpoint
from upcycle.families import Role, family_in
from upcycle.planning import Plan

STORE_NAME = ".layers"
_STATE = "state.safetensors"


class LayerStore:
    """A hidden folder in the staging folder: one file for each merged layer, and the state after.

    Args:
        folder: where it is, or is to be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / STORE_NAME
        self._folder.mkdir(exist_ok=True)

    def save(self, layer: int, tensors: Mapping[Role, Tensor], report: Mapping[str, Any]) -> None:
        """Keep a layer's new tensors and what was measured of it."""
        self._write(f"{layer}.safetensors", tensors, {"report": json.dumps(report)})

    def tensors(self, layer: int) -> dict[Role, Tensor]:
        """A layer's new tensors by role."""
        return load_file(self._path(layer))

    def report(self, layer: int) -> dict[str, Any]:
        """What was measured of a layer."""
        with safe_open(self._path(layer), framework="pt") as file:
            report: dict[str, Any] = json.loads(file.metadata()["report"])
        return report

    def save_state(self, next_layer: int, state: Mapping[str, Tensor]) -> None:
        """Keep what the layers from `next_layer` on need of those before."""
        self._write(_STATE, state, {"next_layer": str(next_layer)})

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """The next layer and what it needs; 0 and nothing before the first."""
        path = self._folder / _STATE
        if not path.is_file():
            return 0, {}
        with safe_open(path, framework="pt") as file:
            next_layer = int(file.metadata()["next_layer"])
            return next_layer, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _path(self, layer: int) -> Path:
        return self._folder / f"{layer}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Whole or not at all: a kill must not leave half a file under its name."""
        unfinished = self._folder / f"{name}.new"
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(whole, unfinished, metadata=dict(metadata))
        os.replace(unfinished, self._folder / name)


class StoredLayers:
    """Gives the files the layers of a store: a `Merger`.

    Args:
        store: has every layer of the plan.
        checkpoint: the source.
        todo: what is made of it.
    """

    def __init__(self, store: LayerStore, checkpoint: Checkpoint, todo: Plan) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._family = family_in(checkpoint)
        self._shape = todo.source_shape

    def names(self, layer: int) -> list[str]:
        """The source's tensors that a layer is made from."""
        return list(self._family.tensor_names(layer, self._shape).values())

    def changed(self, layer: int) -> dict[Role, Tensor]:
        """All of the layer's new tensors."""
        return self._store.tensors(layer)

    def kept(self, layer: int, role: Role) -> Iterator[bytes]:
        """The bytes of the source's tensor."""
        return self._checkpoint.chunks(self._family.tensor_names(layer, self._shape)[role])
