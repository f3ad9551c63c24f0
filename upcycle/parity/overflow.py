"""The largest magnitudes in a program, and where it left the range of fp16."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from upcycle.interpreter.shaping import SHAPING
from upcycle.program.graph import Function
from upcycle.program.operation import Operation
from upcycle.program.values import LARGEST_FP16

_JOINS = {"add", "select", *SHAPING}


@dataclass(frozen=True)
class Extreme:
    """The largest |x| that one operation made.

    Attributes:
        operation: its type, such as "linear".
        value: the name of its result.
        magnitude: the largest |x|; infinite where an element was not finite.
    """

    operation: str
    value: str
    magnitude: float


class OverflowProbe:
    """Watches an interpreter.

    Masked scores are left out: the mask's -4e4 is intended, and only a softmax sees it.

    Args:
        functions: of the program.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self._masked = {name for function in functions for name in _masked_scores(function)}
        self._largest: dict[str, Extreme] = {}

    def observe(self, op: Operation, value: Tensor) -> None:
        """Note a result [...] in fp32, before it is rounded."""
        name = op.outputs[0]
        if op.type in SHAPING or name in self._masked or not value.numel():
            return
        magnitude = float(value.abs().max())
        if not math.isfinite(magnitude):  # a NaN too
            magnitude = math.inf
        known = self._largest.get(name)
        if known is None or magnitude > known.magnitude:
            self._largest[name] = Extreme(op.type, name, magnitude)

    def top(self, count: int) -> list[Extreme]:
        """The operations with the largest results."""
        return sorted(self._largest.values(), key=lambda seen: -seen.magnitude)[:count]

    @property
    def overflowed(self) -> list[Extreme]:
        """The operations whose result does not fit into fp16, in the order of the program."""
        return [seen for seen in self._largest.values() if seen.magnitude > LARGEST_FP16]


def _masked_scores(function: Function) -> set[str]:
    """What a softmax reads, back through sums, choices and mere shapes."""
    found: set[str] = set()
    for op in reversed(function.operations):
        if op.type == "softmax" or (op.type in _JOINS and found.intersection(op.outputs)):
            found.update(op.operands)
    return {
        name
        for op in function.operations
        if op.type in ("add", "select")
        for name in op.outputs
        if name in found
    }
