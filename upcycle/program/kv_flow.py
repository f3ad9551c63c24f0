"""Which values of a Core ML function are keys and values of attention, cached or new.

Nothing is known by its name: a cache is a state, or an input that reaches a product of two
activations (attention) with its values unchanged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from upcycle.program.operation import Literal, Operation, TensorType, Weight

VIEWS = frozenset({"expand_dims", "identity", "reshape", "squeeze"})
REFORMS = VIEWS | {"cast", "transpose"}  # what computes nothing
# What these make of keys and values are still the same values, seen or copied.
_KEEPS_VALUES = VIEWS | {
    "cast",
    "concat",
    "dequantize",
    "gather",
    "gather_along_axis",
    "slice_by_index",
    "slice_by_size",
    "slice_update",
    "split",
    "stack",
    "tile",
    "transpose",
}
_CONTRACTIONS = {
    "einsum": ("values",),
    "matmul": ("x", "y"),
    "scaled_dot_product_attention": ("query", "key", "value"),
}


@dataclass(frozen=True)
class Dataflow:
    """The operations of a function and the values between them, nested blocks flattened.

    Attributes:
        operations: in order, constants included.
        types: of every value, by name.
        states: types of the states, by name.
        weights: the constants that lie in a weight file, by name.
        inputs: names of the inputs, without the states.
        outputs: names of the outputs.
        literals: values of the constants that lie in the program itself, by name.
        declared: shapes of the inputs and states as the package promises them to an app, by name;
            a flexible dimension is written as a range.
    """

    operations: tuple[Operation, ...]
    types: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    weights: Mapping[str, Weight]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    literals: Mapping[str, Literal] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        """The operation that makes each value."""
        return {name: op for op in self.operations for name in op.outputs}


class KvFlow:
    """Follows keys and values through a function.

    Args:
        function: whose operations are in an order in which they can run.
    """

    def __init__(self, function: Dataflow) -> None:
        self._function = function
        self._operations = function.operations

    @cached_property
    def constants(self) -> frozenset[str]:
        """Values that depend on no input."""
        found = {*self._function.weights, *self._function.literals}
        for op in self._operations:
            if op.type == "const" or (op.operands and found.issuperset(op.operands)):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def contractions(self) -> tuple[Operation, ...]:
        """Products of activations with each other: those of attention."""
        return tuple(
            op
            for op in self._operations
            if op.type in _CONTRACTIONS and not self.constants.intersection(contracted(op))
        )

    @cached_property
    def attended(self) -> frozenset[str]:
        """Values that a contraction reads, as they are or after a mere copy."""
        return self._back(name for op in self.contractions for name in contracted(op))

    @cached_property
    def cache_inputs(self) -> tuple[str, ...]:
        """Inputs that hold keys or values."""
        return tuple(
            name
            for name in self._function.inputs
            if name in self.attended and len(self._shape(name)) > 2
        )

    @cached_property
    def cache_outputs(self) -> tuple[str, ...]:
        """Outputs that hold keys or values: new ones, or the whole cache."""
        if not self.cache_inputs:
            return ()
        return tuple(name for name in self._function.outputs if self.attended & self._back([name]))

    @cached_property
    def values(self) -> frozenset[str]:
        """Values that hold (part of) a cache's content, or copies of new keys or values."""
        found = {*self.cache_inputs, *self._written_to_states}
        for op in self._operations:
            if (
                op.type == "read_state"
                or (op.type == "tile" and self.attended.intersection(op.outputs))
                or (op.type in _KEEPS_VALUES and found.intersection(passed_on(op)))
            ):
                found.update(op.outputs)
        return frozenset(found - self.constants)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Values that become, without a copy, a state's new content or an output of the cache."""
        return self._back([*self._written_to_states, *self.cache_outputs], VIEWS)

    @cached_property
    def in_place(self) -> frozenset[str]:
        """Values that are a cache itself or a view of it."""
        found = set(self.cache_inputs)
        for op in self._operations:
            if op.type == "read_state" or (
                (op.type in VIEWS or op.type == "slice_update" or self.is_outermost_slice(op))
                and found.intersection(passed_on(op)[:1])
            ):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """New keys or values and the cache that they go into: names of (new, whole)."""
        inside = [
            (op.inputs["update"][0], op.inputs["x"][0])
            for op in self._operations
            if op.type == "slice_update" and op.inputs["x"][0] in self.in_place
        ]
        paired = len(self.cache_inputs) == len(self.cache_outputs)
        outside = zip(self.cache_outputs, self.cache_inputs, strict=True) if paired else ()
        return (*inside, *outside)

    @cached_property
    def rewrites(self) -> tuple[tuple[str, str], ...]:
        """Writes that replace all of a state, however they are spelled: (state, new content)."""
        found = []
        for op in self._operations:
            if op.type == "write_state":
                state, value = op.inputs["input"][0], op.inputs["data"][0]
                made = self._function.producers.get(value)
                if made is None or made.type != "slice_update":
                    found.append((state, value))
                elif self._shape(made.inputs["update"][0]) == self._function.states[state].shape:
                    found.append((state, made.inputs["update"][0]))
        return tuple(found)

    def is_outermost_slice(self, op: Operation) -> bool:
        """Whether an operation takes a contiguous part: a slice along the outermost axis."""
        if op.type != "slice_by_index":
            return False
        source, output = self._shape(op.inputs["x"][0]), self._shape(op.outputs[0])
        return len(source) == len(output) and source[1:] == output[1:]

    def _shape(self, name: str) -> tuple[int | None, ...]:
        return self._function.types[name].shape

    @cached_property
    def _written_to_states(self) -> tuple[str, ...]:
        return tuple(op.inputs["data"][0] for op in self._operations if op.type == "write_state")

    def _back(self, names: Iterable[str], kinds: frozenset[str] = _KEEPS_VALUES) -> frozenset[str]:
        """These values and all that they were made of by operations of some kinds."""
        found = set(names)
        for op in reversed(self._operations):
            if op.type in kinds and found.intersection(op.outputs):
                found.update(passed_on(op))
        return frozenset(found - self.constants)


def contracted(op: Operation) -> tuple[str, ...]:
    """The factors of a contraction."""
    return tuple(name for key in _CONTRACTIONS[op.type] for name in op.inputs.get(key, ()))


def passed_on(op: Operation) -> tuple[str, ...]:
    """The operands whose values pass through an operation that keeps them."""
    keys = ("x", "values", "input", "update")
    return tuple(name for key in keys for name in op.inputs.get(key, ()))
