"""What an operation of a program reads: its operands by name, as its evaluation wants them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from upcycle.export.graph import Operation, TensorType

Value = Tensor | str


class Arguments:
    """The operands of one operation.

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
        """The tensors of an operand that is a list."""
        found = [self._values[name] for name in self._operation.inputs[key]]
        assert all(isinstance(value, Tensor) for value in found), key
        return found  # type: ignore[return-value]

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

    def integer(self, key: str, default: int | None = None) -> int:
        """An operand that is one integer."""
        return self.ints(key, None if default is None else [default])[0]

    def flags(self, key: str, count: int) -> list[bool]:
        """An operand of Booleans, all False where there is none."""
        return [bool(value) for value in self.ints(key, [0] * count)]

    def flag(self, key: str, default: bool = False) -> bool:
        """An operand that is one Boolean."""
        return bool(self.integer(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """An operand that is one number."""
        if key not in self and default is not None:
            return default
        return float(self.stored(key))

    def text(self, key: str, default: str = "") -> str:
        """An operand that is a word."""
        if key not in self:
            return default
        value = self._values[self._operation.inputs[key][0]]
        assert isinstance(value, str), key
        return value


Evaluation = Callable[[Arguments], Tensor | tuple[Tensor, ...]]


def computed(value: Tensor) -> Tensor:
    """A value to compute with: fp16 becomes fp32, so that sums are accumulated there."""
    return value.float() if value.is_floating_point() else value
