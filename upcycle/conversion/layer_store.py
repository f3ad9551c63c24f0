"""Layers that were merged ahead of the files they go into, kept on disk so that a run can go on."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from upcycle.checkpoint.files import under_utf8_name
from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import clear, follow_umask, sync
from upcycle.conversion.merging import LayerMerger, by_weights_alone
from upcycle.families import Role
from upcycle.planning import Plan, planned_family

STORE_NAME = ".layers"
_STATE = "state.safetensors"


class LayerStore:
    """A hidden folder in the staging folder: one file for each merged layer, and the state after.

    Args:
        folder: where it is, or is to be.
        sources: content hashes of the source's weights, by file name: what is there is taken over
            only if it was made from the same.
    """

    def __init__(self, folder: Path, sources: Mapping[str, str]) -> None:
        self._folder = folder / STORE_NAME
        self._folder.mkdir(exist_ok=True)
        self._sources = dict(sources)
        self._layers: dict[str, str] = {}  # content hashes by file name
        self._next_layer, self._state = self._taken_over() or (0, {})
        if not self._next_layer:
            clear(self._folder)

    def save(self, layer: int, tensors: Mapping[Role, Tensor], report: Mapping[str, Any]) -> None:
        """Keep a layer's new tensors and what was measured of it."""
        path = self._folder / _name(layer)
        self._write(path, tensors, {"report": json.dumps(report)})
        self._layers[path.name] = hash_file(path)

    def tensors(self, layer: int) -> dict[Role, Tensor]:
        """A layer's new tensors by role."""
        with under_utf8_name(self._folder) as named:
            return load_file(named / _name(layer))

    def report(self, layer: int) -> dict[str, Any]:
        """What was measured of a layer."""
        with (
            under_utf8_name(self._folder) as named,
            safe_open(named / _name(layer), framework="pt") as file,
        ):
            report: dict[str, Any] = json.loads(file.metadata()["report"])
        return report

    def save_state(self, next_layer: int, state: Mapping[str, Tensor]) -> None:
        """Keep what the layers from `next_layer` on need of those before."""
        facts = {"next_layer": next_layer, "sources": self._sources, "layers": self._layers}
        self._write(self._folder / _STATE, state, {"facts": json.dumps(facts)})

    def take_state(self) -> tuple[int, dict[str, Tensor]]:
        """The next layer and what it needs, once; 0 and nothing where there is none."""
        state, self._state = self._state, {}
        return self._next_layer, state

    def _taken_over(self) -> tuple[int, dict[str, Tensor]] | None:
        """What an earlier run left, if it is whole and of the same source."""
        try:
            with (
                under_utf8_name(self._folder) as named,
                safe_open(named / _STATE, framework="pt") as file,
            ):
                facts = json.loads(file.metadata()["facts"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            layers = {name: hash_file(self._folder / name) for name in facts["layers"]}
            if (facts["sources"], facts["layers"]) != (self._sources, layers):
                return None
            next_layer = int(facts["next_layer"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None  # none yet, or damaged
        self._layers = layers
        return next_layer, state

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        """Whole or not at all: neither a kill nor a power cut leaves half a file under its name."""
        unfinished = path.with_suffix(".new")
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        with under_utf8_name(self._folder) as named:
            save_file(whole, named / unfinished.name, metadata=dict(metadata))
        follow_umask(unfinished)
        sync(unfinished)
        os.replace(unfinished, path)
        sync(self._folder)


def _name(layer: int) -> str:
    return f"{layer}.safetensors"


class StoredLayers:
    """Gives the files the layers of a store, and merges extra attention by its weights: a `Merger`.

    Args:
        store: has every decoder layer of the plan.
        checkpoint: the source.
        todo: what is made of it.
    """

    def __init__(self, store: LayerStore, checkpoint: Checkpoint, todo: Plan) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._family = planned_family(checkpoint, todo)
        self._shape = todo.source_shape
        self._by_weights = LayerMerger(checkpoint, by_weights_alone(todo), allow_nonfinite=False)
        self._extra = {extra.layer for extra in todo.extra}

    def names(self, layer: int) -> list[str]:
        """The source's tensors that a layer is made from."""
        return list(self._family.tensor_names(layer, self._shape).values())

    def changed(self, layer: int) -> dict[Role, Tensor]:
        """All of a decoder layer's new tensors; of extra attention, those that are no copies."""
        if layer in self._extra:
            return self._by_weights.changed(layer)
        return self._store.tensors(layer)

    def kept(self, layer: int, role: Role) -> Iterator[bytes]:
        """The bytes of the source's tensor."""
        if layer in self._extra:
            return self._by_weights.kept(layer, role)
        return self._checkpoint.chunks(self._family.tensor_names(layer, self._shape)[role])
