"""The functions of a Core ML program as data."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from upcycle.program.kv_flow import Dataflow, KvFlow
from upcycle.program.operation import Literal, Operation, Tile

METADATA_KEY = "upcycle"  # of the manifest of `upcycle export` in a package's metadata


@dataclass(frozen=True)
class Function(Dataflow):
    """One function of a program."""

    @cached_property
    def histogram(self) -> Counter[str]:
        """How often each operation occurs, without constants."""
        return Counter(op.type for op in self.operations if op.type != "const")

    @cached_property
    def kv(self) -> KvFlow:
        """Which of the values are keys and values of attention."""
        return KvFlow(self)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Every `tile`, with what it copies."""
        return tuple(
            Tile(
                self.types[op.outputs[0]].shape,
                self.types[op.outputs[0]].nbytes,
                of_kv=op.outputs[0] in self.kv.values,
            )
            for op in self.operations
            if op.type == "tile"
        )

    @cached_property
    def state_writes(self) -> Counter[str]:
        """How often each state is written."""
        writes = Counter(dict.fromkeys(self.states, 0))
        writes.update(op.inputs["input"][0] for op in self.operations if op.type == "write_state")
        return writes

    @property
    def is_static(self) -> bool:
        """Whether every shape is known, so that bytes can be counted."""
        return all(None not in tensor.shape for tensor in self.types.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files that this function needs, each constant once."""
        return _stored_bytes([self])

    def literal(self, op: Operation, key: str) -> Literal | None:
        """The value of an operand that is a constant of the program itself."""
        names = op.inputs.get(key, ())
        return self.literals.get(names[0]) if names else None


@dataclass(frozen=True)
class Graph:
    """A Core ML program.

    Attributes:
        functions: by name; a package with one function calls it "main".
        metadata: what the exporter noted, such as its own manifest.
        default: name of the function that runs unless an app names another.
    """

    functions: Mapping[str, Function]
    metadata: Mapping[str, str]
    default: str

    @property
    def decode(self) -> Function:
        """The default function: in a language model the one that decodes."""
        return self.functions[self.default]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files, what several functions share counted once."""
        return _stored_bytes(self.functions.values())


def _stored_bytes(functions: Iterable[Function]) -> int:
    records = {
        (weight.file, weight.offset): weight.nbytes
        for function in functions
        for weight in function.weights.values()
    }
    return sum(records.values())
