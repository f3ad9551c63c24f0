"""The saved package of a tiny Llama, and what cannot become one."""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.errors import ExportError, OutputError, UpcycleError
from upcycle.export.checks import BrokenExportError, check_graph
from upcycle.export.coreml import ExportResult, export_coreml
from upcycle.export.stateful import StateCache
from upcycle.options.attention_forms import QFOLD, REPEAT_KV
from upcycle.options.export import ExportOptions
from upcycle.program.reading import read_graph
from upcycle.program.specification import read_specification

if TYPE_CHECKING:
    from upcycle.progress import Progress

LAYERS, HEADS, GROUPS, HEAD_DIM, CONTEXT = 2, 8, 2, 8, 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "source"
    return tiny_checkpoint(folder, num_key_value_heads=GROUPS)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "shallow"
    return tiny_checkpoint(folder, num_key_value_heads=GROUPS, num_hidden_layers=1)


@pytest.fixture(scope="module", params=["qfold", "repeat-kv"])
def exported(request: pytest.FixtureRequest, source: Path) -> ExportResult:
    output = source.parent / f"{request.param}.mlpackage"
    return export_coreml(source, output, ExportOptions(context=CONTEXT, attention=request.param))


def test_only_repeat_kv_copies_keys_and_values(exported: ExportResult) -> None:
    copies = [tile for tile in exported.function.tiles if tile.of_kv]
    if exported.options.attention == "qfold":
        assert copies == []
    else:
        group = (1, GROUPS, HEADS // GROUPS, CONTEXT, HEAD_DIM)
        assert [tile.shape for tile in copies] == [group] * 2 * LAYERS
        assert sum(tile.nbytes for tile in copies) == 4 * HEADS * CONTEXT * HEAD_DIM * 2


def test_nothing_of_the_model_was_dropped(exported: ExportResult) -> None:
    function = exported.function
    assert function.histogram["linear"] == 7 * LAYERS + 1
    assert function.state_writes == {"keyCache": LAYERS, "valueCache": LAYERS}
    states = {name: state.shape for name, state in function.states.items()}
    shape = (LAYERS, GROUPS, CONTEXT, HEAD_DIM)
    assert states == {"keyCache": shape, "valueCache": shape}


def test_inputs_and_outputs_have_their_names_and_shapes(exported: ExportResult) -> None:
    description = read_specification(exported.package).description
    inputs = {value.name: list(value.type.multiArrayType.shape) for value in description.input}
    assert inputs == {"inputIds": [1, 1], "position": [1], "causalMask": [1, 1, 1, CONTEXT]}
    outputs = {value.name: list(value.type.multiArrayType.shape) for value in description.output}
    assert outputs == {"logits": [1, 1, 260]}


def test_the_metadata_says_what_made_it(exported: ExportResult) -> None:
    metadata = read_graph(exported.package).metadata
    assert metadata["co.huggingface.exporters.name"] == "source"
    manifest = json.loads(metadata["upcycle"])
    assert manifest == exported.manifest.document
    assert manifest["options"] == exported.options.noted()
    assert manifest["result"]["decoder"]["masks"] == {"causalMask": None}
    assert set(manifest["source"]) == {"config.json", "model.safetensors"}
    assert not any("date" in key for key in metadata)


def test_exporting_twice_gives_the_same_bytes(shallow: Path, tmp_path: Path) -> None:
    one, two = (
        hash_folder(export_coreml(shallow, tmp_path / name, ExportOptions(context=32)).package)
        for name in ("one.mlpackage", "two.mlpackage")
    )
    assert len(one) == 3
    assert one == two


def test_progress_is_told_and_nothing_else_is_printed(
    shallow: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Progress] = []
    export_coreml(
        shallow, tmp_path / "model.mlpackage", ExportOptions(context=32), watch=seen.append
    )
    notes = ["loading", "converting main", "checking", ""]
    assert [moment.note for moment in seen] == notes
    assert seen[-1].done == seen[-1].total
    assert capfd.readouterr() == ("", "")


def test_one_head_per_group_has_nothing_to_repeat(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "mha", num_key_value_heads=HEADS, num_hidden_layers=1)
    result = export_coreml(
        source, tmp_path / "mha.mlpackage", ExportOptions(context=32, attention="repeat-kv")
    )
    assert result.function.tiles == ()


def test_a_dropped_cache_write_is_caught(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor index converts without an error, and without the write and its projections."""

    def update(
        self: StateCache, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: object
    ) -> tuple[Tensor, Tensor]:
        index = self.start + torch.arange(key_states.shape[2])
        self.keys[layer_idx, :, index] = key_states[0]
        self.values[layer_idx, :, index] = value_states[0]
        return self.keys[layer_idx : layer_idx + 1], self.values[layer_idx : layer_idx + 1]

    monkeypatch.setattr(StateCache, "update", update)
    output = tmp_path / "model.mlpackage"
    with pytest.raises(BrokenExportError, match="linear: 6 instead of 8"):
        export_coreml(shallow, output, ExportOptions(context=32))
    assert list(tmp_path.iterdir()) == []


def test_unexpected_copies_are_caught(exported: ExportResult) -> None:
    other = REPEAT_KV if exported.options.attention == QFOLD.name else QFOLD
    wrong = exported.options.model_copy(update={"attention": other.name})
    with pytest.raises(BrokenExportError, match="tile of K and V"):
        check_graph(exported.function, exported.shape, wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 33}, "context 33 is not a positive multiple of 32"),
        ({"context": 0}, "context 0 is not a positive multiple of 32"),
        ({"context": 160}, "context 160 is more than the model's 128 positions"),
        ({"prefill": 64, "context": 64}, "prefill 64 is not between 2 and the context of 64"),
        ({"prefill": 1}, "prefill 1 is not between 2 and the context of 512"),
        ({"attention": "sdpa"}, "unknown attention 'sdpa'"),
        ({"kv_cache": "ring"}, "unknown kv-cache 'ring'"),
        ({"split_head": 0}, "the output head cannot have 0 parts"),
        ({"split_head": 65}, "the output head cannot have 65 parts"),
        (
            {"quantize": "lut6", "split_head": 3},
            "260 output channels as palette 6-bit do not split",
        ),
    ],
)
def test_bad_options_are_refused(
    source: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export_coreml(source, tmp_path / "model.mlpackage", ExportOptions(**options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_bad_outputs_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model does not end in \.mlpackage"):
        export_coreml(source, tmp_path / "model")
    taken = tmp_path / "model.mlpackage"
    taken.mkdir()
    with pytest.raises(OutputError, match="exists"):
        export_coreml(source, taken)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (math.nan, "holds NaN or infinite numbers"),
        (-math.inf, "holds NaN or infinite numbers"),
        (-7e4, "has numbers up to 70,000, and fp16 ends at 65,504"),
    ],
)
def test_a_weight_that_fp16_cannot_hold_is_named(
    shallow: Path, tmp_path: Path, number: float, message: str
) -> None:
    """The last token's row, which no comparison of logits reads."""
    model = AutoModelForCausalLM.from_pretrained(shallow)
    model.model.embed_tokens.weight.data[-1, 3] = number
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ExportError, match=rf"^model\.embed_tokens\.weight {message}"):
        export_coreml(tmp_path / "source", tmp_path / "model.mlpackage", ExportOptions(context=32))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the checkpoint is quantised"),
        ({"intermediate_size": 32}, "tensors of LlamaForCausalLM are missing or have another"),
        ({"num_hidden_layers": 3}, "9 tensors of LlamaForCausalLM are missing or have another"),
    ],
)
def test_bad_checkpoints_are_refused(
    source: Path, tmp_path: Path, edit: dict[str, object], message: str
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | edit))
    with pytest.raises(UpcycleError, match=message):
        export_coreml(copy, tmp_path / "model.mlpackage", ExportOptions(context=32))


def test_the_traced_weights_are_the_checkpoints(exported: ExportResult) -> None:
    """The weight file holds every parameter once, tied or not, in fp16, and the rotary tables."""
    parameters = 2 * 260 * 64 + LAYERS * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96)
    stored = exported.function.weight_bytes
    assert 2 * parameters < stored < 2 * parameters * 1.1
