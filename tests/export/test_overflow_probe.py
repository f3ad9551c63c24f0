"""The lean overflow probe decides as coremltools' own does, in a fraction of its memory."""

import hashlib
import inspect
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from upcycle.export.precision import lean_overflow_probe, overflows_fp16
from upcycle.export.quiet import quiet_coremltools

with quiet_coremltools():
    from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

ORIGINAL = FP16ComputePrecision.fp16_overflow
SPECIAL = [0.0, -1.0, 65504.0, 65504.01, -65505.0, 65520.0, 1e38, 1.1e38, 9e37, -9.9e37]
numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([*SPECIAL, float("inf"), float("-inf"), float("nan")]).map(
        lambda x: float(np.float32(x))
    ),
)


def operation(*values: Any, list_of: Any = None) -> Any:
    """An operation of MIL with constant inputs, as far as the probe looks at it."""

    def variable(value: Any) -> Any:
        constant = SimpleNamespace(op_type="const", val=SimpleNamespace(val=value))
        return SimpleNamespace(
            op=constant, is_tensor_or_scalar_of=lambda dtype: value.dtype == np.float32
        )

    inputs: dict[str, Any] = {f"x{i}": variable(value) for i, value in enumerate(values)}
    inputs["activation"] = SimpleNamespace(op=None)
    if list_of is not None:
        inputs["values"] = [variable(value) for value in list_of]
    return SimpleNamespace(inputs=inputs)


def test_it_replaces_the_function_that_it_was_written_for() -> None:
    """Fails with another coremltools: see whether that still needs the lean probe."""
    source = inspect.getsource(ORIGINAL)
    assert (
        hashlib.sha256(source.encode()).hexdigest()
        == "16442a50be56e0f9b346ac9d2fd5a490444582913c674389670a26389629055f"
    )
    with lean_overflow_probe():
        assert FP16ComputePrecision.fp16_overflow is not ORIGINAL
    assert FP16ComputePrecision.fp16_overflow is ORIGINAL


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, array_shapes(min_dims=0, max_dims=3, max_side=5), elements=numbers))
def test_decides_like_the_original(values: NDArray[np.float32]) -> None:
    for op in (operation(values), operation(values.T), operation(list_of=[values])):
        with lean_overflow_probe():
            found = FP16ComputePrecision.fp16_overflow(op)
        assert found == ORIGINAL(op)


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, 3 * 2**20])
def test_every_place_is_looked_at(place: int) -> None:
    values = np.zeros(3 * 2**20 + 1, dtype=np.float32)
    assert not overflows_fp16(values)
    values[place] = 1e5
    assert overflows_fp16(values)


def test_other_constants_do_not_count() -> None:
    with lean_overflow_probe():
        assert not FP16ComputePrecision.fp16_overflow(operation(np.array([10**6])))


def test_takes_little_memory() -> None:
    values = np.ones((1000, 8000), dtype=np.float32)
    tracemalloc.start()
    assert not overflows_fp16(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes / 3
