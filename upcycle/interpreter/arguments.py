"""What an operation of a program reads: its operands by name, as its evaluation wants them.

A damaged program asks for what is not there, which is an error of the program.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.program.operation import Operation, TensorType

Value = Tensor | str

_SMALL = 1 << 20  # elements that there is memory for in any case
_SLOTS = ("begin", "end", "size")
# What torch and Python raise where operands do not fit an operation or each other. Memory is among
# them: sizes too stand in the program.
_UNFIT = (
    ArithmeticError, AssertionError, IndexError, KeyError, MemoryError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class ProgramError(ExportError):
    """An operation of a program that cannot be evaluated.

    Args:
        what: what it asks for, with the numbers seen.
        where: function and operation, which `evaluating` fills in.
    """

    def __init__(self, what: str, where: str = "an operation of the program") -> None:
        super().__init__(what, where=where, fix="export the checkpoint again")


@contextmanager
def evaluating(function: str, op: Operation) -> Iterator[None]:
    """Tell which operation could not be evaluated.

    Raises:
        ProgramError: the block raised what an operation raises whose operands do not fit.
    """
    try:
        yield
    except ProgramError as error:
        raise ProgramError(error.what, _place(function, op)) from error
    except _UNFIT as error:
        reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
        raise ProgramError(f"it cannot be evaluated: {reason}", _place(function, op)) from error


def _place(function: str, op: Operation) -> str:
    value = f", value {op.outputs[0]!r}" if op.outputs else ""
    return f"function {function!r}, operation {op.type!r}{value}"


class Arguments:
    """The operands of one operation, tensors of any shape.

    Every method that reads one raises a `ProgramError` where it is missing or of another kind.

    Args:
        operation: which values it reads.
        values: of the program so far, by name.
        types: of the operation's results, as declared.
    """

    def __init__(
        self, operation: Operation, values: Mapping[str, Value], types: tuple[TensorType, ...]
    ) -> None:
        self._operation = operation
        self._values = values
        self.types = types

    def __contains__(self, key: str) -> bool:
        return bool(self._operation.inputs.get(key))

    def stored(self, key: str) -> Tensor:
        """An operand as it is kept: floats may be fp16."""
        return self.all_stored(key)[0]

    def all_stored(self, key: str) -> list[Tensor]:
        """The tensors of an operand that is a list.

        Raises:
            ProgramError: there is none, or a word among them.
        """
        found = []
        for value in self._named(key):
            if not isinstance(value, Tensor):
                raise ProgramError(f"its operand {key!r} is the word {value!r}")
            found.append(value)
        return found

    def _named(self, key: str) -> list[Value]:
        names = self._operation.inputs.get(key)
        if not names:
            raise ProgramError(f"it has no operand {key!r}")
        return [self._values[name] for name in names]

    def tensor(self, key: str) -> Tensor:
        """An operand to compute with: floats in fp32."""
        return computed(self.stored(key))

    def optional(self, key: str) -> Tensor | None:
        """The same, or None where there is none."""
        return self.tensor(key) if key in self else None

    def ints(self, key: str, default: list[int] | None = None) -> list[int]:
        """An operand of integers."""
        if key not in self and default is not None:
            return default
        return [int(value) for value in self.stored(key).reshape(-1).tolist()]

    def per_axis(self, key: str, rank: int, default: list[int] | None = None) -> list[int]:
        """An operand of integers, one for each axis.

        Raises:
            ProgramError: there is none, or it has more or fewer.
        """
        found = self.ints(key, default)
        if len(found) != rank:
            raise ProgramError(f"its operand {key!r} has {len(found)} numbers for {rank} axes")
        return found

    def integer(self, key: str, default: int | None = None) -> int:
        """An operand that is one integer."""
        return self.ints(key, None if default is None else [default])[0]

    def flags(self, key: str, count: int) -> list[bool]:
        """An operand of Booleans, one for each axis, all False where there is none."""
        return [bool(value) for value in self.per_axis(key, count, [0] * count)]

    def flag(self, key: str, default: bool = False) -> bool:
        """An operand that is one Boolean."""
        return bool(self.integer(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """An operand that is one number."""
        if key not in self and default is not None:
            return default
        return float(self.stored(key))

    def text(self, key: str, default: str = "") -> str:
        """An operand that is a word.

        Raises:
            ProgramError: it is a tensor.
        """
        if key not in self:
            return default
        (value,) = self._named(key)
        if not isinstance(value, str):
            raise ProgramError(f"its operand {key!r} is not a word")
        return value

    def expect(self, shape: Sequence[int]) -> None:
        """See that a large result is the declared one, before there is memory for it.

        Raises:
            ProgramError: it has another shape.
        """
        if math.prod(shape) > _SMALL and not fits(shape, self.types[0]):
            raise ProgramError(differs(shape, self.types[0]))

    def check_results(self, results: Sequence[Tensor]) -> None:
        """See that the results have the declared shapes.

        Raises:
            ProgramError: they have not, with the slots that were asked for.
        """
        if len(results) != len(self.types):
            raise ProgramError(f"it has {len(results)} results, and {len(self.types)} are declared")
        for result, declared in zip(results, self.types, strict=True):
            if not fits(result.shape, declared):
                slots = [f"{key} {self.ints(key)}" for key in _SLOTS if key in self]
                asked = f" ({', '.join(slots)} of {list(self.stored('x').shape)})" if slots else ""
                raise ProgramError(differs(result.shape, declared) + asked)


Evaluation = Callable[[Arguments], Tensor | tuple[Tensor, ...]]


def fits(shape: Sequence[int], declared: TensorType) -> bool:
    """Whether a value has a declared shape, whose dynamic axes may be of any size."""
    return len(shape) == len(declared.shape) and all(
        expected in (None, size) for size, expected in zip(shape, declared.shape, strict=True)
    )


def broadcast(*tensors: Tensor) -> tuple[int, ...]:
    """The shape of what an operation on each element makes of several tensors."""
    shapes = (tensor.shape for tensor in tensors)
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def differs(shape: Sequence[int], declared: TensorType) -> str:
    """How an error tells of a result whose shape is not the declared one."""
    sizes = [size or "?" for size in declared.shape]
    return f"its result has the shape {list(shape)}, and {sizes} is declared".replace("'", "")


def computed(value: Tensor) -> Tensor:
    """A value to compute with: fp16 becomes fp32, so that sums are accumulated there."""
    return value.float() if value.is_floating_point() else value
