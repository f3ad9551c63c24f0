"""Read a checkpoint folder: configuration, headers, and tensors when they are asked for."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.files import FETCH_AGAIN, chunks_of, read_into, read_json_object
from upcycle.checkpoint.foreign import refuse_adapter, refuse_without_model
from upcycle.checkpoint.headers import TORCH_DTYPES, Header, TensorInfo, read_header
from upcycle.checkpoint.hub import (
    fetch_file,
    fetch_headers,
    fetch_snapshot,
    is_hub_id,
    is_offline,
)
from upcycle.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
_SHARD_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose headers were read and agree with each other.

    Attributes:
        folder: where it lies.
        config_text: `config.json` as it stands in the file.
        config: the same, parsed.
        headers: one for each safetensors file, in the order of their names.
        tensors: every tensor by name.
    """

    folder: Path
    config_text: str
    config: Mapping[str, Any]
    headers: tuple[Header, ...]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, source: str | Path) -> "Checkpoint":
        """Open a local folder, a Hub cache snapshot, or a Hub id.

        Raises:
            CheckpointError: there is no such checkpoint, it has no safetensors weights, or its
                files are damaged or contradict each other.
        """
        folder = resolve(source)
        refuse_adapter(folder)
        has_index, has_single = (os.path.lexists(folder / n) for n in (INDEX_FILE, SINGLE_FILE))
        if not (has_index or has_single):
            refuse_without_model(folder, f"{SINGLE_FILE} and no {INDEX_FILE}")
        config_text, config = read_config(folder)
        weight_map = _weight_map(folder) if has_index else {}
        names = sorted(set(weight_map.values())) if has_index else [SINGLE_FILE]
        if has_single and SINGLE_FILE not in names:
            raise CheckpointError(
                f"{folder} has {SINGLE_FILE} and an index of other shards, two sets of weights",
                where=str(folder),
                fix=f"remove the stale one; transformers would load {SINGLE_FILE}",
            )
        explicit = config.get("transformers_weights")
        if explicit not in (None, INDEX_FILE if has_index else SINGLE_FILE):
            raise CheckpointError(
                f"transformers_weights names {explicit!r} as the weights",
                where=f"{folder / CONFIG_FILE}, transformers_weights",
                fix=f"remove the key if {SINGLE_FILE} or {INDEX_FILE} is the model",
            )
        headers = tuple(read_header(folder / name) for name in names)
        tensors = _all_tensors(folder, headers)
        _check_index(folder, weight_map, tensors)
        return cls(folder, config_text, config, headers, tensors)

    @classmethod
    def describe(cls, source: str | Path) -> "Checkpoint":
        """As `open`, but no weights of a Hub id are fetched: they cannot be read.

        Raises:
            CheckpointError: as for `open`.
        """
        if not _asks_hub(source):
            return cls.open(source)
        folder = resolve_config(source)
        config_text, config = read_config(folder)
        headers = tuple(fetch_headers(str(source), folder))
        return cls(folder, config_text, config, headers, _all_tensors(folder, headers))

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> "Tensor":
        """One tensor in its own dtype, read from disk now.

        Raises:
            CheckpointError: the file has changed, or torch has no such dtype.
        """
        import torch

        info = self.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{name} is stored as {info.dtype}, which torch cannot compute with",
                where=f"{self.folder / info.shard}, {name}",
                fix="cast it to a floating-point dtype first",
            )
        tensor = torch.empty(info.shape, dtype=getattr(torch, TORCH_DTYPES[info.dtype]))
        # Not mapped: a map counts as memory while it lives, and kills us if the file shrinks.
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        read_into(self.folder / info.shard, info.offset, view)
        return tensor

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor as they lie on disk, undecoded, a part at a time.

        Raises:
            CheckpointError: the file has become shorter.
        """
        tensor = self.tensors[name]
        return chunks_of(self.folder / tensor.shard, tensor.offset, tensor.nbytes)


def resolve(source: str | Path) -> Path:
    """The local folder of a source; a Hub id is fetched through `huggingface_hub`.

    Raises:
        CheckpointError: no such folder, and no such model on the Hub or no way to reach it.
    """
    folder = Path(source)
    if os.path.isdir(folder):
        return folder
    if os.path.lexists(folder) or not is_hub_id(source):
        raise CheckpointError(
            f"{source} is not a folder",
            where=os.path.abspath(folder),
            fix="name a checkpoint folder with config.json and safetensors files, or a Hub id",
        )
    return fetch_snapshot(str(source))


def resolve_config(source: str | Path) -> Path:
    """The local folder of a source's `config.json`; of a Hub id nothing else is fetched.

    Raises:
        CheckpointError: as for `resolve`.
    """
    return fetch_file(str(source), CONFIG_FILE).parent if _asks_hub(source) else resolve(source)


def _asks_hub(source: str | Path) -> bool:
    return is_hub_id(source) and not os.path.lexists(source) and not is_offline()


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """`config.json` as text and as a dictionary.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}",
            where=str(path),
            fix="name a Hugging Face checkpoint folder",
        )
    return read_json_object(path)


def _all_tensors(folder: Path, headers: tuple[Header, ...]) -> dict[str, TensorInfo]:
    """The tensors of all shards, those that an index forgot included: transformers loads them."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor {tensor.name} is in two shards",
                    where=f"{tensors[tensor.name].shard} and {tensor.shard} in {folder}",
                    fix="remove the stale shard",
                )
            tensors[tensor.name] = tensor
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: which file of this folder has which tensor."""
    path = folder / INDEX_FILE
    weight_map = read_json_object(path)[1].get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map from tensor to file name", where=str(path), fix=FETCH_AGAIN
        )
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"the index names {shard!r}, which is no safetensors file of this folder",
                where=str(path),
                fix="an index may only name safetensors files beside it",
            )
    return weight_map


def _check_index(
    folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].shard != shard:
            raise CheckpointError(
                f"the index says that {name} is in {shard}, which does not have it",
                where=str(folder / INDEX_FILE),
                fix="fetch the index and its shards again, from one revision",
            )
