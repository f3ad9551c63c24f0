"""Convert large weights to fp16 without holding them in memory several times.

coremltools asks of every weight whether it overflows fp16, and for that indexes it with
64-bit indices of each of its axes: 24 bytes per number of a matrix, which made up half of the
peak of a conversion.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle.export.quiet import replaced
from upcycle.program.values import LARGEST_FP16

_CHUNK = 2**20
_INFINITE = 1e38  # coremltools takes what is beyond it for a mask's infinity


def lean_overflow_probe() -> AbstractContextManager[None]:
    """Let coremltools probe weights for fp16 overflow piece by piece, with the same answers."""
    from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

    return replaced(FP16ComputePrecision, "fp16_overflow", staticmethod(_has_overflowing_weight))


def _has_overflowing_weight(operation: Any) -> bool:
    """Whether a constant fp32 input of a MIL operation has numbers that fp16 cannot hold."""
    for given in operation.inputs.values():
        for variable in given if isinstance(given, list | tuple) else [given]:
            if (
                variable.op is not None
                and variable.op.op_type == "const"
                and variable.is_tensor_or_scalar_of(dtype="fp32")
                and overflows_fp16(np.asarray(variable.op.val.val))
            ):
                return True
    return False


def overflows_fp16(values: NDArray[Any]) -> bool:
    """Whether a number of [...] is beyond ±65,504 and yet no infinity (beyond 1e38)."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        size = np.abs(flat[start : start + _CHUNK])
        if bool(np.any((size > LARGEST_FP16) & (size < _INFINITE))):
            return True
    return False
