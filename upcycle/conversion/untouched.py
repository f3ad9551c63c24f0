"""The proof that copied tensors are the source's, byte for byte."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from upcycle.checkpoint.headers import TensorSpec, read_header
from upcycle.checkpoint.reader import Checkpoint
from upcycle.planning import Copy, Plan, PlannedShard

_CHUNK = 1 << 18


def differing_copies(source: Checkpoint, output: Checkpoint, todo: Plan) -> list[str]:
    """Names of the tensors that should be identical and are not, or that nobody planned.

    Args:
        source: where the tensors came from.
        output: the folder as it was written, opened anew.
        todo: which tensors are copies.
    """
    copies = [op.output.name for op in todo.operations if isinstance(op, Copy)]
    differing = [name for name in copies if not _identical(source, output, name)]
    planned = {op.output.name for op in todo.operations}
    return [*differing, *sorted(set(output.tensors) - planned)]


def _identical(source: Checkpoint, output: Checkpoint, name: str) -> bool:
    ours, theirs = output.tensors.get(name), source.tensors[name]
    if ours is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    pairs = zip(_pieces(source.chunks(name)), _pieces(output.chunks(name)), strict=True)
    return all(before == after for before, after in pairs)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of one size: made tensors come in larger ones than read ones."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= _CHUNK:
            yield bytes(held[:_CHUNK])
            del held[:_CHUNK]
    yield bytes(held)


def prove_shard(source: Checkpoint, folder: Path, shard: PlannedShard) -> str:
    """Read a written file back, compare its copies with the source, and return its content hash.

    Args:
        source: where the copies came from; they are read from there once more.
        folder: where the file is.
        shard: what should be in it.
    """
    path = folder / shard.name
    header = read_header(path)
    written = [TensorSpec(t.name, t.dtype, t.shape) for t in header.tensors]
    planned = [op.output for op in shard.operations]
    assert written == planned, f"{path} does not hold the planned tensors"
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:  # the header's tensors lie end to end
        digest.update(file.read(header.data_start))
        for op in shard.operations:
            if isinstance(op, Copy):
                for expected in source.chunks(op.output.name):
                    found = file.read(len(expected))
                    assert found == expected, f"copied tensor differs: {op.output.name}"
                    digest.update(found)
            else:
                for begin in range(0, op.output.nbytes, _CHUNK):
                    digest.update(file.read(min(_CHUNK, op.output.nbytes - begin)))
    return f"xxh3-128:{digest.hexdigest()}"
