"""Every operation of the interpreter against coremltools' own values, or torch's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from upcycle.export.quiet import quiet_coremltools
from upcycle.interpreter.arguments import Arguments, Value
from upcycle.interpreter.prepare import EVALUATIONS
from upcycle.program.operation import Operation, TensorType

with quiet_coremltools():
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder, Function

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((2, 3, 4)).astype(np.float32)
Y = GENERATOR.standard_normal((2, 3, 4)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5
UNIT = X / (np.abs(X).max() + 0.1)
INTEGERS = GENERATOR.integers(-9, 9, (2, 3, 4)).astype(np.int32)
FLAGS, OTHER_FLAGS = X > 0, Y > 0
MATRIX = GENERATOR.standard_normal((5, 4)).astype(np.float32)
PICKS = np.array([[0, 2], [1, -1]], np.int32)


def tensor(value: Any) -> Value:
    return value if isinstance(value, str) else torch.from_numpy(np.array(value))


def interpreted(name: str, operands: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What the interpreter makes of an operation, before types are settled."""
    values: dict[str, Value] = {}
    names = {}
    for key, value in operands.items():
        parts = value if isinstance(value, tuple) else (value,)
        names[key] = tuple(f"{key}{i}" for i in range(len(parts)))
        values |= zip(names[key], map(tensor, parts), strict=True)
    types = (TensorType((), "float32"),)
    found = EVALUATIONS[name](Arguments(Operation(name, names, ("result",)), values, types))
    return found if isinstance(found, tuple) else (found,)


def by_coremltools(name: str, operands: dict[str, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    with Function({}, opset_version=ct.target.iOS18):
        found = getattr(Builder, name)(**operands)
    variables = found if isinstance(found, list | tuple) else [found]
    return tuple(np.array(variable.val) for variable in variables)


def check(name: str, operands: dict[str, Any]) -> None:
    found, expected = interpreted(name, operands), by_coremltools(name, operands)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert tuple(ours.shape) == theirs.shape
        np.testing.assert_allclose(
            ours.double().numpy(), theirs.astype(np.float64), rtol=2e-5, atol=1e-6
        )


UNARY = [
    "abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "round", "sign", "sin",
    "sinh", "square", "tan", "tanh",
]  # fmt: skip
BINARY = [
    "add", "equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "mul",
    "not_equal", "sub",
]  # fmt: skip
REDUCTIONS = [
    "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_max", "reduce_mean",
    "reduce_min", "reduce_prod", "reduce_sum", "reduce_sum_square",
]  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(name, {"x": X}) for name in UNARY],
    *[(name, {"x": UNIT}) for name in ("acos", "asin", "atanh")],
    *[(name, {"x": POSITIVE}) for name in ("inverse", "log", "rsqrt", "sqrt")],
    ("inverse", {"x": POSITIVE, "epsilon": np.float32(0.5)}),
    ("rsqrt", {"x": POSITIVE, "epsilon": np.float32(0.5)}),
    *[(name, {"x": X, "y": Y}) for name in BINARY],
    *[(name, {"x": X, "y": Y[:1, :, :1]}) for name in ("add", "mul", "maximum")],
    *[(name, {"x": INTEGERS, "y": np.int32(4)}) for name in ("floor_div", "mod", "add", "mul")],
    ("floor_div", {"x": X, "y": POSITIVE}),
    ("mod", {"x": X, "y": POSITIVE}),
    ("pow", {"x": POSITIVE, "y": np.float32(2.5)}),
    ("real_div", {"x": X, "y": POSITIVE}),
    ("logical_not", {"x": FLAGS}),
    *[(f"logical_{name}", {"x": FLAGS, "y": OTHER_FLAGS}) for name in ("and", "or", "xor")],
    ("clip", {"x": X, "alpha": np.float32(-0.5), "beta": np.float32(0.7)}),
    ("threshold", {"x": X, "alpha": np.float32(0.2)}),
    ("select", {"cond": FLAGS, "a": X, "b": Y}),
    ("softmax", {"x": X, "axis": 1}),
    ("relu", {"x": X}),
    ("sigmoid", {"x": X}),
    ("softplus", {"x": X}),
    ("elu", {"x": X, "alpha": np.float32(0.3)}),
    ("leaky_relu", {"x": X, "alpha": np.float32(0.3)}),
    ("clamped_relu", {"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.6)}),
    ("linear_activation", {"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.6)}),
    ("scaled_tanh", {"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.6)}),
    ("sigmoid_hard", {"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.6)}),
    ("softsign", {"x": X}),
    ("gelu", {"x": X, "mode": "EXACT"}),
    ("gelu", {"x": X, "mode": "TANH_APPROXIMATION"}),
    ("gelu", {"x": X, "mode": "SIGMOID_APPROXIMATION"}),
    ("prelu", {"x": X.reshape(2, 3, 2, 2), "alpha": np.float32([0.1, 0.2, 0.3])}),
    *[
        (name, {"x": X, "axes": np.int32([1, -1]), "keep_dims": keep})
        for name in REDUCTIONS
        for keep in (True, False)
    ],
    ("reduce_log_sum", {"x": POSITIVE, "axes": np.int32([0]), "keep_dims": False}),
    ("reduce_mean", {"x": X}),
    ("reduce_argmax", {"x": X, "axis": 1, "keep_dims": True}),
    ("reduce_argmin", {"x": X, "axis": 1, "keep_dims": False}),
    ("argsort", {"x": X, "axis": 1, "ascending": True}),
    ("topk", {"x": X, "k": 2, "axis": -1}),
    ("topk", {"x": X, "k": 2, "axis": 1, "ascending": True}),
    *[("cumsum", {"x": X, "axis": 1, "reverse": reverse}) for reverse in (True, False)],
    ("layer_norm", {"x": X, "axes": np.int32([-1]), "gamma": X[0, 0], "beta": Y[0, 0]}),
    ("linear", {"x": X, "weight": MATRIX, "bias": np.arange(5, dtype=np.float32)}),
    ("matmul", {"x": X, "y": MATRIX, "transpose_y": True}),
    ("matmul", {"x": X, "y": Y, "transpose_x": True}),
    ("einsum", {"values": (X[None], Y[None].swapaxes(1, 3)), "equation": "bnhw,bwhu->bnhu"}),
    ("reshape", {"x": X, "shape": np.int32([4, -1])}),
    ("reshape", {"x": X, "shape": np.int32([0, -1, 2])}),
    ("expand_dims", {"x": X, "axes": np.int32([0, -1])}),
    ("squeeze", {"x": X[:1, :, :1], "axes": np.int32([0, -1])}),
    ("squeeze", {"x": X[:1]}),
    ("transpose", {"x": X, "perm": np.int32([2, 0, 1])}),
    ("concat", {"values": (X, Y), "axis": -1}),
    ("stack", {"values": (X, Y), "axis": 1}),
    ("split", {"x": X, "num_splits": 2, "axis": -1}),
    ("split", {"x": X, "split_sizes": np.int32([1, 2]), "axis": 1}),
    ("tile", {"x": X, "reps": np.int32([1, 3, 2])}),
    ("pad", {"x": X, "pad": np.int32([1, 0, 2, 1]), "mode": "constant"}),
    ("pad", {"x": X, "pad": np.int32([1, 2]), "mode": "reflect"}),
    ("band_part", {"x": X, "lower": 0, "upper": 1}),
    ("fill", {"shape": np.int32([2, 3]), "value": np.float32(1.5)}),
    ("range_1d", {"start": np.int32(2), "end": np.int32(11), "step": np.int32(3)}),
    ("reverse", {"x": X, "axes": np.int32([0, 2])}),
    ("slice_by_size", {"x": X, "begin": np.int32([0, 1, 1]), "size": np.int32([-1, 2, 2])}),
    ("gather", {"x": X, "indices": PICKS, "axis": 1}),
    ("gather", {"x": X, "indices": PICKS, "axis": 2, "batch_dims": 1}),
    ("gather_along_axis", {"x": X, "indices": np.abs(INTEGERS) % 3, "axis": 1}),
    ("flatten2d", {"x": X, "axis": 2}),
    ("shape", {"x": X}),
    ("identity", {"x": X}),
    ("cast", {"x": INTEGERS, "dtype": "fp32"}),
]


@pytest.mark.parametrize(
    ("name", "operands"), CASES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)]
)
def test_equals_coremltools_own_value(name: str, operands: dict[str, Any]) -> None:
    check(name, operands)


TORCH_X, TORCH_Y = torch.from_numpy(X), torch.from_numpy(Y)
IMAGE = torch.from_numpy(GENERATOR.standard_normal((1, 4, 6, 5)).astype(np.float32))
KERNEL = torch.from_numpy(GENERATOR.standard_normal((6, 2, 3, 3)).astype(np.float32))
QUERY, KEY, VALUE = (
    torch.from_numpy(GENERATOR.standard_normal((1, 2, size, 8)).astype(np.float32))
    for size in (3, 5, 5)
)
CHANNELS = {key: GENERATOR.random(3).astype(np.float32) + 0.1 for key in ("mean", "variance")}
# coremltools has no value for these, or a wrong one (`cumsum`, `concat`).
BY_TORCH: list[tuple[str, dict[str, Any], torch.Tensor]] = [
    ("silu", {"x": X}, functional.silu(TORCH_X)),
    (
        "one_hot",
        {"indices": np.abs(PICKS), "one_hot_vector_size": 4, "axis": -1},
        functional.one_hot(torch.tensor([[0, 2], [1, 1]]), 4),
    ),
    (
        "cumsum",
        {"x": X, "axis": 1, "exclusive": True},
        torch.cat([torch.zeros(2, 1, 4), TORCH_X.cumsum(1)[:, :-1]], 1),
    ),
    (
        "concat",
        {"values": (X, Y), "axis": 1, "interleave": True},
        torch.stack(
            [
                TORCH_X[:, 0],
                TORCH_Y[:, 0],
                TORCH_X[:, 1],
                TORCH_Y[:, 1],
                TORCH_X[:, 2],
                TORCH_Y[:, 2],
            ],
            1,
        ),
    ),
    ("gather_nd", {"x": X, "indices": np.int32([[0, 1], [1, 2]])}, TORCH_X[[0, 1], [1, 2]]),
    (
        "gather_nd",
        {"x": X, "indices": np.int32([[0], [2]]), "batch_dims": 1},
        TORCH_X[[0, 1], [0, 2]],
    ),
    (
        "scatter_nd",
        {"data": X, "indices": np.int32([[0, 1], [0, 1]]), "updates": Y[0, :2], "mode": "add"},
        TORCH_X.index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), TORCH_Y[0, :2], True),
    ),
    (
        "scatter_nd",
        {"data": X, "indices": np.int32([[0, 1], [1, -1]]), "updates": Y[0, :2], "mode": "update"},
        TORCH_X.index_put((torch.tensor([0, 1]), torch.tensor([1, 2])), TORCH_Y[0, :2]),
    ),
    (
        "scatter_along_axis",
        {"data": X, "indices": np.abs(INTEGERS) % 3, "updates": Y, "axis": 1, "mode": "add"},
        TORCH_X.scatter_add(1, torch.from_numpy(np.abs(INTEGERS) % 3).long(), TORCH_Y),
    ),
    (
        "fill_like",
        {"ref_tensor": X, "value": np.float32(2)},
        torch.full_like(TORCH_X, 2),
    ),
    ("l2_norm", {"x": X}, TORCH_X / (TORCH_X.square().sum((1, 2), True) + 1e-6).sqrt()),
    (
        "batch_norm",
        {"x": X, **CHANNELS},
        functional.batch_norm(TORCH_X, *(torch.from_numpy(x) for x in CHANNELS.values())),
    ),
    (
        "conv",
        {
            "x": IMAGE.numpy(),
            "weight": KERNEL.numpy(),
            "pad_type": "custom",
            "pad": np.int32([1, 1, 2, 0]),
            "strides": np.int32([2, 1]),
            "groups": 2,
        },
        functional.conv2d(functional.pad(IMAGE, (2, 0, 1, 1)), KERNEL, stride=(2, 1), groups=2),
    ),
    (
        "conv",
        {"x": IMAGE.numpy(), "weight": KERNEL.numpy(), "pad_type": "same", "groups": 2},
        functional.conv2d(IMAGE, KERNEL, padding="same", groups=2),
    ),
    (
        "conv",
        {
            "x": IMAGE.numpy(),
            "weight": MATRIX[:, :, None, None],
            "pad_type": "valid",
            "bias": np.arange(5, dtype=np.float32),
        },
        functional.conv2d(IMAGE, torch.from_numpy(MATRIX)[..., None, None], torch.arange(5.0)),
    ),
    (
        "scaled_dot_product_attention",
        {"query": QUERY.numpy(), "key": KEY.numpy(), "value": VALUE.numpy()},
        functional.scaled_dot_product_attention(QUERY, KEY, VALUE),
    ),
    (
        "scaled_dot_product_attention",
        {
            "query": QUERY.numpy(),
            "key": KEY.numpy(),
            "value": VALUE.numpy(),
            "attn_mask": np.tri(3, 5, dtype=bool),
        },
        functional.scaled_dot_product_attention(QUERY, KEY, VALUE, is_causal=True),
    ),
]


@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    BY_TORCH,
    ids=[f"{i}-{name}" for i, (name, *_) in enumerate(BY_TORCH)],
)
def test_equals_torch(name: str, operands: dict[str, Any], expected: torch.Tensor) -> None:
    (found,) = interpreted(name, operands)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@st.composite
def slices(draw: st.DrawFn) -> dict[str, Any]:
    """A valid slice of a random array, as `slice_by_index` takes it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axes = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        end = draw(st.integers(begin + 1, size))
        back = draw(st.booleans())  # counted from the end
        axes.append((begin - size if back else begin, end - size if back and end < size else end))
    flags = st.lists(st.booleans(), min_size=len(shape), max_size=len(shape))
    squeeze = draw(flags)
    squeeze[0] = False  # coremltools cannot make a scalar of fp32
    return {
        "x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        "begin": np.int32([begin for begin, _ in axes]),
        "end": np.int32([end for _, end in axes]),
        "stride": np.int32(
            draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
        ),
        "begin_mask": np.array(draw(flags)) & ~np.array(squeeze),
        "end_mask": np.array(draw(flags)),
        "squeeze_mask": np.array(squeeze),
    }


@settings(max_examples=60)
@given(operands=slices())
def test_slices_equal_coremltools(operands: dict[str, Any]) -> None:
    check("slice_by_index", operands)
    (part,) = interpreted("slice_by_index", operands)
    update = -1 - np.arange(part.numel(), dtype=np.float32).reshape(part.shape)
    check("slice_update", {**operands, "update": update})


def test_a_negative_stride_turns_the_axis_around() -> None:
    operands = {
        "x": X,
        "begin": np.int32([0, 2, 0]),
        "end": np.int32([2, 0, 4]),
        "stride": np.int32([1, -1, 2]),
    }
    (found,) = interpreted("slice_by_index", operands)
    np.testing.assert_array_equal(found.numpy(), X[:, 2:0:-1, ::2])
