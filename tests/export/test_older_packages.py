"""Packages for iOS 16 and 17, whose compressed weights keep their parts in attributes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from upcycle.errors import ExportError
from upcycle.export.quiet import quiet_coremltools
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.program.counting import count_traffic
from upcycle.program.graph import Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.reading import read_graph

with quiet_coremltools():
    import coremltools as ct
    import coremltools.optimize.coreml as cto
    from coremltools.converters.mil.mil import Builder, types

WIDTH = 64
WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
X = torch.from_numpy(np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32))
PALETTE = {"mode": "uniform", "weight_threshold": 0}


def converted(target: Any, weight: Any = None, precision: Any = ct.precision.FLOAT16) -> Any:
    """A linear layer, which has a bias too."""

    @Builder.program(  # type: ignore[untyped-decorator]
        input_specs=[Builder.TensorSpec((1, WIDTH))], opset_version=target
    )
    def program(x: Any) -> Any:
        return Builder.linear(
            x=x, weight=WEIGHT if weight is None else weight(), name="y"
        )  # with a bias

    with quiet_coremltools():
        return ct.convert(
            program,
            minimum_deployment_target=target,
            compute_precision=precision,
            skip_model_load=True,
        )


def saved(model: Any, package: Path) -> Graph:
    with quiet_coremltools():
        model.save(str(package))
    return read_graph(package)


def result(graph: Graph) -> torch.Tensor:
    found = Interpreter(Loaded(graph), half=False).run("main", {"x": X})
    return next(iter(found.values()))


def palettized(model: Any, bits: int) -> Any:
    config = cto.OptimizationConfig(cto.OpPalettizerConfig(nbits=bits, **PALETTE))
    return cto.palettize_weights(model, config)


def quantised(model: Any, _: int) -> Any:
    config = cto.OptimizationConfig(cto.OpLinearQuantizerConfig(weight_threshold=0))
    return cto.linear_quantize_weights(model, config)


def pruned(model: Any, _: int) -> Any:
    config = cto.OpMagnitudePrunerConfig(target_sparsity=0.75, weight_threshold=0)
    return cto.prune_weights(model, cto.OptimizationConfig(config))


@pytest.mark.parametrize(
    ("target", "compress", "bits", "kind", "stored"),
    [
        (ct.target.iOS17, palettized, 4, "lut_to_dense", WIDTH**2 // 2 + 2 * 16),
        (ct.target.iOS16, palettized, 6, "lut_to_dense", WIDTH**2 * 6 // 8 + 2 * 64),
        (ct.target.iOS16, palettized, 1, "lut_to_dense", WIDTH**2 // 8),  # the palette: a literal
        (ct.target.iOS16, quantised, 8, "affine_dequantize", WIDTH**2 + 3 * WIDTH),
        (ct.target.iOS17, pruned, 16, "sparse_to_dense", WIDTH**2 // 8 + WIDTH**2 // 2),
    ],
)
def test_weights_count_compressed_and_are_coremltools_own(
    target: Any, compress: Any, bits: int, kind: str, stored: int, tmp_path: Path
) -> None:
    with quiet_coremltools():
        model = compress(converted(target), bits)
        dense = cto.decompress_weights(model)
    graph = saved(model, tmp_path / "model.mlpackage")
    assert graph.decode.histogram[f"constexpr_{kind}"] == 1
    assert lint_graph(graph) == []
    assert count_traffic(graph.decode).weights == pytest.approx(stored + 2 * WIDTH, rel=1e-3)
    assert graph.weight_bytes == count_traffic(graph.decode).weights
    expected = result(saved(dense, tmp_path / "dense.mlpackage"))
    torch.testing.assert_close(result(graph), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, X @ torch.from_numpy(WEIGHT).T, atol=1e-4)


def test_weights_that_are_only_cast(tmp_path: Path) -> None:
    def cast() -> Any:
        return Builder.constexpr_cast(source_val=WEIGHT.astype(np.float16), output_dtype="fp32")

    model = converted(ct.target.iOS16, cast, precision=ct.precision.FLOAT32)
    graph = saved(model, tmp_path / "model.mlpackage")
    assert graph.decode.histogram["constexpr_cast"] == 1
    assert count_traffic(graph.decode).weights == 2 * WIDTH**2 + 4 * WIDTH
    expected = X @ torch.from_numpy(WEIGHT).half().float().T
    torch.testing.assert_close(result(graph), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["uint1", "uint2", "uint3", "uint4", "uint6", "int4"])
def test_small_constants_of_less_than_a_byte(dtype: str, tmp_path: Path) -> None:
    """They lie in the program itself, packed."""
    bits = int(dtype.lstrip("uint"))
    numbers = np.random.default_rng(2).integers(0, 2**bits, (1, 7))
    if dtype == "int4":
        numbers -= 8
    data = numbers.astype(types.string_to_nptype(dtype))

    @Builder.program(  # type: ignore[untyped-decorator]
        input_specs=[Builder.TensorSpec((1, 7))], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        lut = np.arange(2**bits, dtype=np.float16).reshape(1, 1, -1, 1)
        scale = np.ones((1, 1), np.float16)
        dense = (
            Builder.constexpr_blockwise_shift_scale(data=data, scale=scale)
            if dtype == "int4"
            else Builder.constexpr_lut_to_dense(indices=data, lut=lut)
        )
        return Builder.add(x=Builder.cast(x=x, dtype="fp16"), y=dense)

    with quiet_coremltools():
        model = ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    graph = saved(model, tmp_path / "model.mlpackage")
    inputs = {"x": torch.zeros(1, 7)}
    (found,) = Interpreter(Loaded(graph), half=False).run("main", inputs).values()
    assert found.tolist() == numbers.tolist()


def test_a_compressed_weight_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    graph = saved(palettized(converted(ct.target.iOS16), 4), tmp_path / "model.mlpackage")
    unknown = [op for op in graph.decode.operations if op.type == "constexpr_lut_to_dense"]
    object.__setattr__(unknown[0], "type", "constexpr_of_tomorrow")
    with pytest.raises(ExportError, match="does not know the operation 'constexpr_of_tomorrow'"):
        result(graph)
