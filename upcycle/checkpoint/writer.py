"""Write safetensors shards of a known layout, tensor by tensor, and their index."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from upcycle.checkpoint.headers import TORCH_DTYPES, TensorSpec, header_bytes
from upcycle.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 18  # a longer write takes the kernel longer per byte: it looks for larger pages


@dataclass(frozen=True)
class ShardLayout:
    """One output file: its tensors in the order in which they are written."""

    name: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str] | None


class ShardWriter:
    """Writes one shard front to back; the header is known before the first tensor.

    Args:
        folder: where the file goes.
        layout: what it will hold.
    """

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self._layout = layout
        self._digest = xxhash.xxh3_128()
        self._file = (folder / layout.name).open("wb")
        self._pending = iter(layout.tensors)
        self._write(header_bytes(layout.tensors, layout.metadata))

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the next tensor of the layout."""
        expected = next(self._pending)
        assert expected.name == name, f"{name} was written where {expected.name} belongs"
        written = 0
        for chunk in chunks:
            self._write(chunk)
            written += len(chunk)
        assert written == expected.nbytes, f"{name}: {written} bytes, not {expected.nbytes}"

    def close(self) -> str:
        """Close the complete file and return its content hash."""
        assert next(self._pending, None) is None, f"{self._layout.name} lacks tensors"
        self._file.close()
        return f"xxh3-128:{self._digest.hexdigest()}"

    def abandon(self) -> None:
        """Close an incomplete file; the staging folder that holds it goes away."""
        self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        for begin in range(0, len(data), _CHUNK):
            self._file.write(data[begin : begin + _CHUNK])


def write_index(folder: Path, layouts: Iterable[ShardLayout]) -> None:
    """Write the index of a sharded checkpoint, with sizes counted anew."""
    layouts = list(layouts)
    tensors = [tensor for layout in layouts for tensor in layout.tensors]
    document = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {tensor.name: layout.name for layout in layouts for tensor in layout.tensors},
    }
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / INDEX_FILE).write_text(text, encoding="utf-8")


def rewrite(
    checkpoint: Checkpoint, folder: Path, replacements: Mapping[str, "Tensor"]
) -> dict[str, str]:
    """Write a checkpoint's shards anew with some tensors replaced; returns hashes by file name.

    Names, order, sharding and stored dtypes stay: a replacement is cast to the dtype that the
    checkpoint stores, and everything else is copied as bytes.

    Args:
        checkpoint: the layout to keep.
        folder: where the shards and the index go.
        replacements: new values by tensor name, of the stored shapes.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    layouts = [
        ShardLayout(header.path.name, header.tensors, header.metadata)
        for header in checkpoint.headers
    ]
    hashes = {}
    for layout in layouts:
        writer = ShardWriter(folder, layout)
        try:
            for tensor in layout.tensors:
                if tensor.name in replacements:
                    new = replacements[tensor.name]
                    assert tuple(new.shape) == tensor.shape, f"{tensor.name}: shape changed"
                    writer.write(tensor.name, tensor_chunks(new, tensor.dtype))
                else:
                    writer.write(tensor.name, checkpoint.chunks(tensor.name))
            hashes[layout.name] = writer.close()
        finally:
            writer.abandon()
    if (checkpoint.folder / INDEX_FILE).is_file():
        write_index(folder, layouts)
    return hashes


def tensor_chunks(tensor: "Tensor", dtype: str) -> Iterator[memoryview]:
    """A tensor's bytes in a stored dtype, by safetensors name."""
    import torch

    stored = tensor.detach().to("cpu", getattr(torch, TORCH_DTYPES[dtype])).contiguous()
    yield stored.reshape(-1).view(torch.uint8).numpy().data


def split_by_size(sizes: Sequence[int], limit: int) -> list[slice]:
    """Fill one file after another in order; what is larger than the limit gets a file of its own.

    Args:
        sizes: bytes of each tensor.
        limit: the most bytes of tensors in a file; its header is not counted.
    """
    parts, begin, filled = [], 0, 0
    for position, size in enumerate(sizes):
        if position > begin and filled + size > limit:
            parts.append(slice(begin, position))
            begin, filled = position, 0
        filled += size
    return [*parts, slice(begin, len(sizes))]


def shard_name(position: int, count: int) -> str:
    """The name of file `position` (from 0) of `count`."""
    if count == 1:
        return SINGLE_FILE
    stem, suffix = SINGLE_FILE.split(".")
    return f"{stem}-{position + 1:05}-of-{count:05}.{suffix}"
