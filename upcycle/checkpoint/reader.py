"""Read a checkpoint folder: configuration, headers, and tensors when they are asked for."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.headers import Header, TensorInfo, read_header
from upcycle.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
_CHUNK = 4 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
        config_text, config = read_config(folder)
        headers = tuple(read_header(folder / name) for name in _shard_names(folder))
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
        _check_index(folder, tensors)
        return cls(folder, config_text, config, headers, tensors)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> "Tensor":
        """One tensor in its own dtype, read from disk now."""
        from safetensors import safe_open

        with safe_open(self.folder / self.tensors[name].shard, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor as they lie on disk, undecoded, a few MiB at a time."""
        tensor = self.tensors[name]
        with (self.folder / tensor.shard).open("rb") as file:
            file.seek(tensor.offset)
            left = tensor.nbytes
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise CheckpointError(
                        f"{tensor.shard} became shorter while it was read",
                        where=str(self.folder / tensor.shard),
                        fix="keep the source unchanged during a conversion",
                    )
                left -= len(chunk)
                yield chunk


def resolve(source: str | Path) -> Path:
    """The local folder of a source; a Hub id is fetched through `huggingface_hub`.

    Raises:
        CheckpointError: no such folder, and no such model on the Hub or no way to reach it.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(
            f"{source} is not a folder",
            where=str(folder.absolute()),
            fix="name a checkpoint folder with config.json and safetensors files, or a Hub id",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), ignore_patterns=["*.bin", "*.pt", "*.gguf"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{source} is no folder here, and the Hub did not give it: {type(error).__name__}",
            where=str(source),
            fix="check the spelling, or download the model and name its folder",
        ) from error


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """`config.json` as text and as a dictionary.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}",
            where=str(path),
            fix="name a Hugging Face checkpoint folder",
        )
    text = path.read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{CONFIG_FILE} is not JSON: {error}", where=str(path), fix="mend or fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{CONFIG_FILE} is not a JSON object", where=str(path), fix="mend or fetch it again"
        )
    return text, config


def _shard_names(folder: Path) -> list[str]:
    """The safetensors files that make up the model."""
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(folder).values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(
                    f"the index names a shard outside the folder: {name}",
                    where=str(folder / INDEX_FILE),
                    fix="an index may only name files beside it",
                )
        return names
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    others = [
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
        for path in sorted(folder.glob(pattern))
    ]
    raise CheckpointError(
        f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}"
        + (f", only {', '.join(others[:4])}" if others else ""),
        where=str(folder),
        fix="save the model with save_pretrained(), which writes safetensors; "
        "pickled weights are never loaded here",
    )


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the index has no readable weight_map", where=str(path), fix="fetch the index again"
        ) from error
    assert isinstance(weight_map, dict)
    return weight_map


def _check_index(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    if not (folder / INDEX_FILE).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in tensors or tensors[name].shard != shard:
            raise CheckpointError(
                f"the index says that {name} is in {shard}, which does not have it",
                where=str(folder / INDEX_FILE),
                fix="fetch the index and its shards again, from one revision",
            )
