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
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")


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
    if folder.exists() or not HUB_ID.fullmatch(str(source)):
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
    return read_json_object(path)


def read_json_object(path: Path) -> tuple[str, dict[str, Any]]:
    """A JSON file as its very text, line ends included, and as a dictionary.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        document = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not readable JSON: {error}",
            where=str(path),
            fix="mend it or fetch it again",
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path.name} is not a JSON object", where=str(path), fix="mend it or fetch it again"
        )
    return text, document


def _shard_names(folder: Path) -> list[str]:
    """The safetensors files that make up the model."""
    has_index, has_single = (folder / INDEX_FILE).is_file(), (folder / SINGLE_FILE).is_file()
    if has_index:
        names = sorted(set(_weight_map(folder).values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"the index names {name!r}, which is no safetensors file of this folder",
                    where=str(folder / INDEX_FILE),
                    fix="an index may only name safetensors files beside it",
                )
        if has_single and SINGLE_FILE not in names:
            raise CheckpointError(
                f"{folder} has {SINGLE_FILE} and an index of other shards, two sets of weights",
                where=str(folder),
                fix=f"remove the stale one; transformers would load {SINGLE_FILE}",
            )
        return names
    if has_single:
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
    weight_map = read_json_object(path)[1].get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise CheckpointError(
            "the index has no weight_map from tensor to file name",
            where=str(path),
            fix="fetch the index again",
        )
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
