"""A function made ready to run: constants read, operations found, lifetimes known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from upcycle.errors import ExportError
from upcycle.interpreter.arguments import Arguments, Evaluation, Value, evaluating
from upcycle.interpreter.compressed import COMPRESSED
from upcycle.interpreter.constants import TORCH_TYPES, literal_tensor, read_weight
from upcycle.interpreter.contraction import CONTRACTIONS
from upcycle.interpreter.elementwise import ELEMENTWISE
from upcycle.interpreter.reduction import REDUCTIONS
from upcycle.interpreter.shaping import SHAPING
from upcycle.memory import physical_memory
from upcycle.program.graph import Function, Graph
from upcycle.program.operation import Literal, Operation, TensorType, Weight

EVALUATIONS: Mapping[str, Evaluation] = (
    ELEMENTWISE | SHAPING | CONTRACTIONS | REDUCTIONS | COMPRESSED
)
_STATE_OPERATIONS = ("read_state", "write_state")

# A constant by what it is made of, so that the functions of a package share it.
Shared = dict[object, tuple[Value, ...]]


@dataclass(frozen=True)
class Step:
    """An operation that runs on every call.

    Attributes:
        operation: what to run.
        types: of its results.
        dying: values that no later step reads.
        into: the state that a `slice_update`'s result is written to next, before it is read again.
    """

    operation: Operation
    types: tuple[TensorType, ...]
    dying: tuple[str, ...]
    into: str | None


@dataclass(frozen=True)
class PreparedFunction:
    """A function to run.

    Attributes:
        function: as read from the package.
        constants: by name, weights decompressed.
        steps: in order.
    """

    function: Function
    constants: Mapping[str, Value]
    steps: tuple[Step, ...]


class Loaded:
    """The functions of a package, made ready when first asked for; they share their constants.

    Args:
        graph: of `read_graph`.

    Raises:
        ExportError: a value has a type that torch lacks, or takes more memory than there is.
    """

    def __init__(self, graph: Graph) -> None:
        for name, function in graph.functions.items():
            _check_types(name, function)
        self.graph = graph
        self._prepared: dict[str, PreparedFunction] = {}
        self._shared: Shared = {}

    def function(self, name: str) -> PreparedFunction:
        """A function to run.

        Raises:
            ExportError: there is none of that name, an operation of it is not known, or a constant
                cannot be read.
        """
        if name not in self.graph.functions:
            raise ExportError(
                f"the package has no function {name!r}",
                where="its program",
                fix=f"choose one of {', '.join(self.graph.functions)}",
            )
        if name not in self._prepared:
            self._prepared[name] = _prepare(name, self.graph.functions[name], self._shared)
        return self._prepared[name]

    def compressed_weights(self, name: str) -> dict[str, Tensor]:
        """The weights of a function that lie compressed in the package, dense, by their names.

        Raises:
            ExportError: as `function`.
        """
        prepared = self.function(name)
        return {
            key: value
            for op in prepared.function.operations
            if op.type in COMPRESSED
            for key in op.outputs
            if isinstance(value := prepared.constants[key], Tensor) and value.is_floating_point()
        }


def _prepare(name: str, function: Function, shared: Shared) -> PreparedFunction:
    _check_operations(name, function)
    constants = _Constants(name, function, shared)
    varying = [op for op in function.operations if not constants.add(op)]
    last = {value: op for op in varying for value in op.operands}
    steps = tuple(
        Step(
            operation=op,
            types=tuple(function.types[output] for output in op.outputs),
            dying=tuple(
                value
                for value in {*op.operands, *op.outputs}
                if last.get(value, op) is op
                and value not in constants.values
                and value not in function.outputs
            ),
            into=_written_next(varying[i:]) if op.type == "slice_update" else None,
        )
        for i, op in enumerate(varying)
    )
    return PreparedFunction(function, constants.values, steps)


def _check_operations(name: str, function: Function) -> None:
    known = {*EVALUATIONS, *_STATE_OPERATIONS, "const"}
    unknown = [op for op in function.operations if op.type not in known]
    if unknown:
        raise ExportError(
            f"the interpreter does not know the operation {unknown[0].type!r}",
            where=f"function {name!r}, value {unknown[0].outputs[0]!r}"
            + (f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""),
            fix="check a package of `upcycle export`, whose operations it knows",
        )


def _check_types(name: str, function: Function) -> None:
    """See that torch has the types of all values, and this machine the memory for each."""
    memory = physical_memory()
    made = {output for op in function.operations if op.type != "const" for output in op.outputs}
    values = {key: function.types[key] for key in (*function.inputs, *made)}
    values |= function.states
    for key, declared in values.items():
        if declared.dtype not in TORCH_TYPES:
            raise ExportError(
                f"the value {key!r} has the type {declared.dtype}, which the interpreter lacks",
                where=f"function {name!r}",
                fix="check a package of `upcycle export`, whose types it knows",
            )
        if declared.elements * TORCH_TYPES[declared.dtype].itemsize > memory:
            raise ExportError(
                f"the value {key!r} of shape {list(declared.shape)} takes {declared.nbytes:,} B, "
                f"and this machine has {memory:,}",
                where=f"function {name!r}",
                fix="make the package again, or check it on a larger machine",
            )


def _written_next(operations: list[Operation]) -> str | None:
    """The state that the first of these operations' result is written to before any other use."""
    result = operations[0].outputs[0]
    following = next((op for op in operations[1:] if op.type in _STATE_OPERATIONS), None)
    if following and following.inputs.get("data", ("",))[0] == result:
        return following.inputs["input"][0]
    return None


def evaluated(op: Operation, given: Arguments) -> tuple[Tensor, ...]:
    """What an operation makes of its operands, in the shapes that are declared.

    Raises:
        ProgramError: the results have others.
    """
    found = EVALUATIONS[op.type](given)
    results = found if isinstance(found, tuple) else (found,)
    given.check_results(results)
    return results


class _Constants:
    """Collects the constants of one function."""

    def __init__(self, name: str, function: Function, shared: Shared) -> None:
        self.values: dict[str, Value] = {}
        self._name = name
        self._function = function
        self._shared = shared
        self._keys: dict[str, object] = {}
        for key, literal in function.literals.items():
            self._keys[key] = (literal, function.types[key])
            self.values[key] = _literal(key, literal, function.types[key])
        for key, weight in function.weights.items():
            self._add_weight(key, weight, function.types[key])

    def add(self, op: Operation) -> bool:
        """Whether an operation makes constants; if so, they are kept."""
        if op.type in COMPRESSED:
            made_of = ((key, *map(self._keys.get, op.inputs[key])) for key in sorted(op.inputs))
            self._keep(op.outputs, (op.type, *made_of), lambda: self._decompressed(op))
        return op.type == "const" or op.type in COMPRESSED

    def _add_weight(self, name: str, weight: Weight, tensor_type: TensorType) -> None:
        key = (weight.file, weight.offset, tensor_type)
        self._keep((name,), key, lambda: (read_weight(weight, tensor_type),))

    def _keep(
        self, names: tuple[str, ...], key: object, make: Callable[[], tuple[Value, ...]]
    ) -> None:
        if key not in self._shared:
            self._shared[key] = make()
        for i, (name, value) in enumerate(zip(names, self._shared[key], strict=True)):
            self.values[name] = value
            self._keys[name] = (key, i)

    def _decompressed(self, op: Operation) -> tuple[Value, ...]:
        types = tuple(self._function.types[name] for name in op.outputs)
        with evaluating(self._name, op):
            return evaluated(op, Arguments(op, self.values, types))


def _literal(name: str, literal: Literal, tensor_type: TensorType) -> Value:
    if literal and isinstance(literal[0], str):
        return literal[0]
    return literal_tensor(literal, tensor_type, name)  # type: ignore[arg-type]
