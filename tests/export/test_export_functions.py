"""Packages with a second function that prefills, and with a cache outside of the program."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.errors import ExportError
from upcycle.export.checks import BrokenExportError, check_graph, check_sharing
from upcycle.export.coreml import ExportResult, export_coreml
from upcycle.export.saving import trace_decoder
from upcycle.options.export import ExportOptions
from upcycle.program.reading import read_graph
from upcycle.program.signature import INPUT_IDS, LOGITS, POSITION, Input, Signature
from upcycle.program.specification import read_specification

if TYPE_CHECKING:
    from upcycle.program.graph import Function

LAYERS, GROUPS, HEAD_DIM, CONTEXT, PREFILL = 2, 2, 8, 64, 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=GROUPS)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions") / "shallow"
    return tiny_checkpoint(folder, num_hidden_layers=1)


@pytest.fixture(scope="module")
def exports(source: Path) -> dict[str, ExportResult]:
    return {
        kv_cache: export_coreml(
            source,
            source.parent / f"{kv_cache}.mlpackage",
            ExportOptions(context=CONTEXT, prefill=PREFILL, kv_cache=kv_cache),
        )
        for kv_cache in ("state", "read-only")
    }


@pytest.fixture(params=["state", "read-only"])
def exported(request: pytest.FixtureRequest, exports: dict[str, ExportResult]) -> ExportResult:
    return exports[request.param]


def test_both_functions_are_the_model_without_any_tile(exported: ExportResult) -> None:
    assert list(exported.functions) == ["main", "prefill"]
    for function in exported.functions.values():
        assert function.histogram["tile"] == 0
        assert function.histogram["linear"] == 7 * LAYERS + 1
        assert max(len(value.shape) for value in function.types.values()) <= 4
    description = read_specification(exported.package).description
    assert description.defaultFunctionName == "main"
    assert read_graph(exported.package).metadata["co.huggingface.exporters.name"] == "source"


def test_inputs_and_outputs_of_each_function(exported: ExportResult) -> None:
    state = exported.options.kv_cache == "state"
    heads = (1, GROUPS, CONTEXT, HEAD_DIM)
    past = {f"{name}{i}": heads for i in range(LAYERS) for name in ("keyCache", "valueCache")}
    for name, queries in (("main", 1), ("prefill", PREFILL)):
        function = exported.functions[name]
        shapes = {each: function.types[each].shape for each in function.inputs}
        assert shapes == {
            "inputIds": (1, queries),
            "position": (1,),
            "causalMask": (1, 1, queries, CONTEXT),
            **({} if state else past),
        }
        new = [f"{name}{i}" for i in range(LAYERS) for name in ("newKey", "newValue")]
        assert list(function.outputs) == ["logits", *([] if state else new)]
        assert set(function.states) == ({"keyCache", "valueCache"} if state else set())


def test_a_read_only_program_has_fewer_operations(exports: dict[str, ExportResult]) -> None:
    for name in ("main", "prefill"):
        counts = [exports[kv].functions[name].histogram.total() for kv in ("read-only", "state")]
        assert counts[0] < counts[1]


def test_quantised_functions_share_their_weights(shallow: Path, tmp_path: Path) -> None:
    """Each is compressed on its own, so that the merging must find equal bytes; twice the same."""
    one, two = (
        export_coreml(
            shallow,
            tmp_path / f"{i}.mlpackage",
            ExportOptions(context=32, prefill=4, quantize="int8"),
        )
        for i in range(2)
    )
    assert hash_folder(one.package) == hash_folder(two.package)
    for name in ("main", "prefill"):
        histogram = one.functions[name].histogram
        assert histogram["constexpr_blockwise_shift_scale"] == 7 + 2
    assert one.quantization is not None
    assert (
        one.manifest.document["result"]["quantization"]["roles"]
        == one.quantization.record()["roles"]
    )
    folder = tmp_path / "0-tokenizer"
    assert {"tokenizer.json", "config.json", "upcycle.json"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("kv_cache", ["state", "read-only"])
def test_other_forms_of_the_linear_layers(shallow: Path, tmp_path: Path, kv_cache: str) -> None:
    result = export_coreml(
        shallow,
        tmp_path / "a.mlpackage",
        ExportOptions(context=32, kv_cache=kv_cache, conv=True, split_head=3, argmax=True),
    )
    assert result.function.histogram["conv"] == 7 + 3
    assert result.function.histogram["linear"] == 0
    assert {"logits", "nextToken"} <= set(result.function.outputs)
    token = result.function.types["nextToken"]
    assert (token.shape, token.dtype) == ((1, 1), "int32")


def test_weights_that_are_not_shared_are_caught() -> None:
    check_sharing(1000, 1020)
    with pytest.raises(BrokenExportError, match=r"2,000 B, one alone has 1,000 B"):
        check_sharing(1000, 2000)


def test_a_cache_of_the_other_kind_is_caught(exported: ExportResult) -> None:
    other = "state" if exported.options.kv_cache != "state" else "read-only"
    wrong = exported.options.model_copy(update={"kv_cache": other})
    function: Function = exported.function
    with pytest.raises(BrokenExportError, match="inputs and outputs of K and V"):
        check_graph(function, exported.shape, wrong)


class ChoosesByToken(nn.Module):
    """Does what no trace can hold: other operations for other tokens."""

    def signature(self, queries: int) -> Signature:
        inputs = (Input(INPUT_IDS, (1, queries), "int32"), Input(POSITION, (1,), "int32"))
        return Signature(inputs=inputs, outputs=(LOGITS,))

    def example_inputs(self, queries: int) -> tuple[Tensor, ...]:
        return torch.zeros(1, queries, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        half = input_ids.float() * 0.5
        return half if input_ids.sum() == 0 else half + position


def test_a_model_that_chooses_operations_by_token_is_refused() -> None:
    with pytest.raises(ExportError, match="does other operations for other tokens"):
        trace_decoder(ChoosesByToken(), 1)
