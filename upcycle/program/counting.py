"""How many bytes one call of a Core ML function must move, counted in its graph.

This is logical traffic, a lower bound that knows no caches and no fusion: it compares graphs.
"""

from dataclasses import dataclass, fields

from upcycle.errors import ExportError
from upcycle.program.graph import Function
from upcycle.program.kv_flow import VIEWS
from upcycle.program.operation import Operation

_FREE = {"const", "read_state", "write_state"}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call of a function moves, by what they are.

    Attributes:
        weights: constants of the weight file, compressed as stored.
        kv_read: KV cache read where it lies.
        kv_write: new K and V written into it, or given out for an app to write.
        copies: copies of K and V (such as `tile` makes), written and read again.
        activations: everything else.
    """

    weights: int = 0
    kv_read: int = 0
    kv_write: int = 0
    copies: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def without_cache(self) -> int:
        """What would be moved with an empty cache: W of the closed form."""
        return self.total - self.kv_read - self.copies


def count_traffic(function: Function) -> Traffic:
    """Count a function's bytes.

    A view moves nothing. A slice reads its output; along the outermost axis it is a view too. An
    in-place update writes its update. Everything else reads its operands and writes its output,
    a contraction (matmul, linear, convolution) too; a gather reads only the rows that it picks.

    Raises:
        ExportError: shapes are dynamic.
    """
    if not function.is_static:
        raise ExportError(
            "the program has dynamic shapes, so bytes per token are not defined",
            where="the types of its values",
            fix="export with fixed shapes",
        )
    counter = _Counter(function)
    for op in function.operations:
        counter.add(op)
    return Traffic(**counter.bytes)


class _Counter:
    """Adds up bytes by class while it follows which values lie where in memory."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.kv = function.kv
        self.bytes = {field.name: 0 for field in fields(Traffic)}
        self.weights = {name: weight.nbytes for name, weight in function.weights.items()}

    def add(self, op: Operation) -> None:
        if op.type in _FREE or op.type in VIEWS or self.kv.is_outermost_slice(op):
            return
        if op.type.startswith("constexpr_"):
            # Decompressed on the fly: its reader moves the compressed bytes.
            self.weights[op.outputs[0]] = sum(self.weights.get(name, 0) for name in op.operands)
        elif op.type == "slice_by_index":
            self._read(op.inputs["x"][0], self._size(op.outputs[0]))
        elif op.type == "slice_update":
            written = "kv_write" if op.outputs[0] in self.kv.in_place else "activations"
            self.bytes[written] += self._size(op.inputs["update"][0])
        elif op.type == "gather":
            self._read(op.inputs["x"][0], sum(map(self._size, op.outputs)))
            self._write(op)
        else:
            for name in op.operands:
                self._read(name, self._size(name))
            self._write(op)

    def _size(self, name: str) -> int:
        if name in self.weights:
            return self.weights[name]
        return self.function.types[name].nbytes if name in self.function.types else 0

    def _read(self, name: str, size: int) -> None:
        """Count a read of `size` bytes of a value."""
        if name in self.weights:
            kind = "weights"
        elif name in self.function.literals:
            return  # small constants of the program itself: axes, shapes
        elif name in self.kv.in_place:
            kind = "kv_read"
        else:
            kind = "copies" if name in self.kv.values else "activations"
        self.bytes[kind] += size

    def _write(self, op: Operation) -> None:
        for name in op.outputs:
            if name in self.kv.stored:
                kind = "kv_write"
            else:
                kind = "copies" if name in self.kv.values else "activations"
            self.bytes[kind] += self._size(name)
