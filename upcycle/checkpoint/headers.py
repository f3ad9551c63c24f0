"""safetensors headers, read and written without decoding a tensor.

Format: 8 bytes little-endian length n, n bytes of JSON, then the data
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import parse_json_object, reading
from upcycle.errors import CheckpointError

# By safetensors' name of a dtype: the bits of a number, and torch's name where it has one.
_DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
DTYPE_BITS = {name: bits for name, (bits, _) in _DTYPES.items()}
TORCH_DTYPES = {name: torch_name for name, (_, torch_name) in _DTYPES.items() if torch_name}
# Those whose numbers heads are merged in.
MERGEABLE_DTYPES = ("F16", "BF16", "F32", "F64")
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library itself
_LARGEST_SIZE = 1 << 63
_TOO_MANY_BITS = 1 << 66  # of 2**63 bytes
_LFS_POINTER = b"version "  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_ROTARY = re.compile(
    r"(^|\.)(rotary_emb|rotary|rotary_embed|rotary_embedding|rope)\."
    r"(\w*inv_freq|cos_cached|sin_cached|cos|sin|freqs|freqs_cis|scale)$"
)
# Masks and positions: GPT-2's `attn.bias` is a lower triangle [1, 1, T, T] and no bias.
_MASKS = re.compile(r"(^|\.)(masked_bias|causal_mask|position_ids|scale_attn|alibi)$")
_TRIANGLE = re.compile(r"(^|\.)(attn|self_attn|attention|self_attention)(\.attention)?\.bias$")
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

    @property
    def is_buffer(self) -> bool:
        """Whether it is a table of positions or a mask, which holds no weights.

        Old checkpoints store such buffers beside the weights; today's classes make them anew.
        """
        if _ROTARY.search(self.name) or _MASKS.search(self.name):
            return True
        shape = self.shape
        square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
        return square and _TRIANGLE.search(self.name) is not None


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

    Whatever passes here, the safetensors library reads in the same way.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is malformed.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if prefix == _LFS_POINTER:
            raise CheckpointError(
                f"{path.name} is a Git LFS pointer, not the weights",
                where=str(path),
                fix="run `git lfs pull` in the folder that was cloned",
            )
        if len(prefix) < 8:
            raise _damaged(path, f"{path.name} has {size} bytes, too few for a header")
        (length,) = struct.unpack("<Q", prefix)
        if length > _LARGEST_HEADER:
            raise _damaged(path, f"{path.name} claims a header of {length:,} bytes")
        if length > size - 8:
            raise _damaged(path, f"{path.name} is truncated: its header needs {length} bytes")
        text = file.read(length)
    try:
        _, document = parse_json_object(text)
    except ValueError as error:
        raise _damaged(path, f"the header of {path.name} is not readable JSON: {error}") from error
    metadata = document.pop("__metadata__", None)
    if metadata is not None and not _is_metadata(metadata):
        raise _damaged(path, f"the metadata of {path.name} is not a JSON object of strings")
    tensors = _tensors(path, document, data_start=8 + length)
    end = tensors[-1].offset + tensors[-1].nbytes if tensors else 8 + length
    if end != size:
        raise _damaged(path, f"{path.name} has {size} bytes but its header speaks of {end}")
    return Header(path, 8 + length, tensors, metadata)


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _tensors(path: Path, document: dict[str, Any], data_start: int) -> tuple[TensorInfo, ...]:
    """The entries in data order, after checking that they lie end to end."""
    tensors = [_tensor(path, name, entry, data_start) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            raise _damaged(path, f"the data of tensor {tensor.name} overlaps or leaves a hole")
        position += tensor.nbytes
    return tuple(tensors)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    """One entry of a header, whose every number is checked."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the header entry of tensor {name} is malformed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise _damaged(path, f"the shape or data_offsets of tensor {name} are no sizes")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"tensor {name} has the unknown dtype {dtype!r}",
            where=str(path),
            fix=f"known are {', '.join(DTYPE_BITS)}; cast the tensor, or fetch the file again",
        )
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= _TOO_MANY_BITS:
            raise _damaged(path, f"tensor {name} has a shape beyond any file")
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise _damaged(path, f"tensor {name} ({dtype}, {shape}) has {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), path.name, data_start + begin)


def _are_sizes(value: object) -> bool:
    """Whether it is a list of non-negative integers, of which True is none."""
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < _LARGEST_SIZE for number in value
    )


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
