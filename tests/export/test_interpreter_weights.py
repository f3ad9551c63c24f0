"""Packed and compressed weights against coremltools' own decompression."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upcycle.errors import ExportError
from upcycle.export.quiet import quiet_coremltools
from upcycle.interpreter.arguments import Arguments
from upcycle.interpreter.compressed import COMPRESSED
from upcycle.interpreter.constants import read_weight, unpack
from upcycle.program.operation import Operation, TensorType, Weight

with quiet_coremltools():
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder, Function, types
    from coremltools.optimize import _utils as packing

RANDOM = np.random.default_rng(0)
Operands = dict[str, np.ndarray[Any, Any]]


def decompressed(name: str, operands: Operands) -> tuple[torch.Tensor, ...]:
    values = {key: torch.from_numpy(np.array(value)) for key, value in operands.items()}
    operation = Operation(name, {key: (key,) for key in operands}, ("result",))
    found = COMPRESSED[name](Arguments(operation, values, (TensorType((), "float16"),)))
    return found if isinstance(found, tuple) else (found,)


def by_coremltools(name: str, operands: dict[str, Any], target: Any) -> tuple[Any, ...]:
    with Function({}, opset_version=target):
        found = getattr(Builder, name)(**operands)
    operation = (found[0] if isinstance(found, list | tuple) else found).op
    value = operation.materialized_val_inference()
    return value if isinstance(value, tuple) else (value,)


def check(name: str, operands: dict[str, Any], target: Any = ct.target.iOS18, **ours: Any) -> None:
    expected = by_coremltools(name, operands, target)
    plain = {key: _plain(value) for key, value in {**operands, **ours}.items()}
    found = decompressed(name, plain)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one.float().numpy(), np.asarray(other, np.float32), rtol=1e-3, atol=1e-4
        )


def _plain(value: Any) -> np.ndarray[Any, Any]:
    """coremltools marks sub-byte types by subclasses of numpy's."""
    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("="))


def small(bits: int, *shape: int) -> np.ndarray[Any, Any]:
    kind = types.string_to_nptype(f"uint{bits}")
    return RANDOM.integers(0, 2**bits, shape).astype(kind)


@given(
    bits=st.sampled_from([1, 2, 3, 4, 6]),
    count=st.integers(1, 70),
    signed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_packed_elements_equal_coremltools(bits: int, count: int, signed: bool, seed: int) -> None:
    elements = np.random.default_rng(seed).integers(0, 2**bits, count).astype(np.uint8)
    packed = packing.pack_elements_into_bits(elements, bits)
    signed = signed and bits == 4
    expected = packing.restore_elements_from_packed_bits(packed, bits, count, signed)
    found = unpack(packed.view(np.uint8), f"{'' if signed else 'u'}int{bits}", count)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (2, 3)])
def test_palettes(bits: int, groups: tuple[int, int]) -> None:
    lut = RANDOM.standard_normal((*groups, 2**bits, 1)).astype(np.float16)
    check("constexpr_lut_to_dense", {"indices": small(bits, 8, 6), "lut": lut})


@pytest.mark.parametrize("axis", [0, 1])
def test_palettes_of_vectors(axis: int) -> None:
    lut = RANDOM.standard_normal((2, 1, 16, 3)).astype(np.float16)
    operands = {"indices": small(4, 8, 6), "lut": lut, "vector_axis": np.int32(axis)}
    check("constexpr_lut_to_dense", operands)


@pytest.mark.parametrize("blocks", [(1, 1), (8, 1), (8, 3), (2, 6)])
@pytest.mark.parametrize("with_offset", [True, False])
def test_scaled_blocks(blocks: tuple[int, int], with_offset: bool) -> None:
    operands = {
        "data": RANDOM.integers(-128, 128, (8, 6)).astype(np.int8),
        "scale": RANDOM.random(blocks).astype(np.float16),
    }
    if with_offset:
        operands["offset"] = RANDOM.integers(-9, 9, blocks).astype(np.int8)
    check("constexpr_blockwise_shift_scale", operands)


def test_sparse_weights() -> None:
    mask = small(1, 8, 6)
    count = int(np.count_nonzero(mask))
    nonzero = RANDOM.standard_normal(count).astype(np.float16)
    check("constexpr_sparse_to_dense", {"nonzero_data": nonzero, "mask": mask})
    lut = RANDOM.standard_normal((2, 1, 16, 1)).astype(np.float16)
    operands = {"indices_mask": mask, "indices_nonzero_data": small(4, count), "lut": lut}
    check("constexpr_lut_to_sparse", operands)
    operands = {
        "data_mask": mask,
        "nonzero_data": RANDOM.integers(-99, 99, count).astype(np.int8),
        "scale": RANDOM.random((8, 1)).astype(np.float16),
    }
    check("constexpr_sparse_blockwise_shift_scale", operands)


@pytest.mark.parametrize("scalar", [True, False])
def test_affine_weights_of_older_packages(scalar: bool) -> None:
    operands = {
        "quantized_data": RANDOM.integers(0, 256, (4, 6)).astype(np.uint8),
        "zero_point": np.uint8(7) if scalar else RANDOM.integers(0, 9, 6).astype(np.uint8),
        "scale": np.float16(0.3) if scalar else RANDOM.random(6).astype(np.float16),
        "axis": np.int32(1),
    }
    check("constexpr_affine_dequantize", operands, ct.target.iOS16)


def test_packed_palettes_and_masks_of_older_packages() -> None:
    indices = packing.pack_elements_into_bits(RANDOM.integers(0, 16, 15).astype(np.uint8), 4)
    shape = np.uint32([5, 3])
    lut = RANDOM.standard_normal(16).astype(np.float16)
    operands = {"indices": indices.view(np.uint8), "lut": lut, "shape": shape}
    check("constexpr_lut_to_dense", operands, ct.target.iOS16, shape=np.int64([5, 3]))
    mask = np.uint8([0b01101001, 0b00000110])
    operands = {"nonzero_data": lut[:6], "mask": mask, "shape": shape}
    check("constexpr_sparse_to_dense", operands, ct.target.iOS16, shape=np.int64([5, 3]))


def test_a_broken_weight_file_is_an_error(tmp_path: Path) -> None:
    tensor_type = TensorType((4, 4), "float16")
    missing = Weight(32, tmp_path / "absent.bin", 64)
    with pytest.raises(ExportError, match="the weight file is missing"):
        read_weight(missing, tensor_type)
    file = tmp_path / "weight.bin"
    file.write_bytes(bytes(256))
    with pytest.raises(ExportError, match="does not hold this constant"):
        read_weight(Weight(32, file, 64), tensor_type)
