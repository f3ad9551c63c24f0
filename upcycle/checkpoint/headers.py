"""safetensors headers, read and written without decoding a tensor.

Format: 8 bytes little-endian length n, n bytes of JSON, then the data
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.errors import CheckpointError

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library itself
_DAMAGED = "the file is damaged or not safetensors: fetch it again"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor that lies in a file.

    Attributes:
        shard: name of the file in the checkpoint folder.
        offset: first byte of the data, counted from the start of the file.
    """

    shard: str
    offset: int


@dataclass(frozen=True)
class Header:
    """One safetensors file: its tensors in the order of their data, and its metadata."""

    path: Path
    data_start: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] | None


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is malformed.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"{path.name} has {size} bytes, too few for a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_LARGEST_HEADER, size - 8):
                raise _damaged(path, f"{path.name} is truncated: its header needs {length} bytes")
            text = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"shard {path.name} is missing",
            where=str(path),
            fix="fetch the missing shard; every shard that the index names must be there",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path.name}: {error.strerror}",
            where=str(path),
            fix="make the file readable",
        ) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header of {path.name} is not JSON") from error
    if not isinstance(document, dict):
        raise _damaged(path, f"the header of {path.name} is not a JSON object")
    metadata = document.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise _damaged(path, f"the metadata of {path.name} is not a JSON object")
    tensors = _tensors(path, document, data_start=8 + length)
    end = tensors[-1].offset + tensors[-1].nbytes if tensors else 8 + length
    if end != size:
        raise _damaged(path, f"{path.name} has {size} bytes but its header speaks of {end}")
    return Header(path, 8 + length, tensors, metadata)


def _tensors(path: Path, document: dict[str, Any], data_start: int) -> tuple[TensorInfo, ...]:
    """The entries in data order, after checking that they lie end to end."""
    tensors = []
    for name, entry in document.items():
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            tensor = TensorInfo(name, dtype, shape, path.name, data_start + begin)
            sound = (
                dtype in DTYPE_BITS
                and all(isinstance(number, int) and number >= 0 for number in (begin, *shape))
                and end - begin == tensor.nbytes
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"the header entry of tensor {name} is malformed") from error
        if not sound:
            raise _damaged(path, f"tensor {name} ({dtype}, {list(shape)}) has {end - begin} bytes")
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            raise _damaged(path, f"the data of tensor {tensor.name} overlaps or leaves a hole")
        position += tensor.nbytes
    return tuple(tensors)


def header_bytes(tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """The header of a file that holds `tensors` in this order, padded so that data is aligned."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix=_DAMAGED)
