"""Operations that ask for what is not there, as those of a damaged program do."""

from collections.abc import Iterator
from contextlib import contextmanager

from upcycle.errors import ExportError
from upcycle.program.operation import Operation

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
