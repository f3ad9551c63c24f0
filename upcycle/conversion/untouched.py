"""The proof that copied tensors are the source's, byte for byte."""

from upcycle.checkpoint.reader import Checkpoint
from upcycle.planning import Copy, Plan


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
    pairs = zip(source.chunks(name), output.chunks(name), strict=True)
    return all(before == after for before, after in pairs)
