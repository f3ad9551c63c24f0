"""The uptrained folder: the student's layout, dtype and files, and new weights only where asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import CLASSIC
from tests.training.runs import tiny_run
from upcycle.errors import OutputError, TrainingError


def layout(folder: Path) -> dict[str, Any]:
    """Every tensor's shard, dtype and shape, in file order."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                found[name] = (path.name, part.get_dtype(), tuple(part.get_shape()))
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layout_dtype_and_other_files_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    run = tiny_run(tmp_path, dtype=dtype, max_shard_size="60KB")
    (run.student / "LICENSE").write_text("mine")
    (run.student / "extra").mkdir()
    (run.student / "extra" / "note.bin.txt").write_bytes(b"\0\1")
    (run.student / "config.json").write_text(
        (run.student / "config.json").read_text().replace("  ", "\t")
    )
    result = run.train(steps=2)
    assert layout(result.output) == layout(run.student)
    assert len(list(result.output.glob("*.safetensors"))) > 1
    sidecars = [
        path.relative_to(run.student)
        for path in run.student.rglob("*")
        if path.is_file() and "safetensors" not in path.name
    ]
    assert len(sidecars) >= 5
    for path in sidecars:
        assert (result.output / path).read_bytes() == (run.student / path).read_bytes(), path
    AutoModelForCausalLM.from_pretrained(result.output)


QUERY_AND_OUTPUT = {"q_proj", "q_layernorm", "o_proj", "dense"}


@pytest.mark.parametrize(
    ("trainable", "moving"),
    [
        ("kv", {"k_proj", "v_proj", "k_layernorm"}),
        ("attention", {*QUERY_AND_OUTPUT, "k_proj", "v_proj", "k_layernorm"}),
    ],
)
@pytest.mark.parametrize("model_type", CLASSIC)
def test_only_the_chosen_weights_move(
    tmp_path: Path, model_type: str, trainable: str, moving: set[str]
) -> None:
    run = tiny_run(tmp_path, model_type=model_type, num_hidden_layers=1)
    result = run.train(steps=2, trainable=trainable)
    before, after = weights(run.student), weights(result.output)
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    expected = {name for name in before if ".self_attn." in name and name.split(".")[-2] in moving}
    # A softmax does not see a bias that all keys share, unless rotation tells them apart.
    assert moved <= expected
    assert {name for name in expected if name.endswith("weight")} <= moved
    assert 0 < result.masters_moved <= 1


def test_all_weights_move_by_default(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    before, after = weights(run.student), weights(run.train(steps=2).output)
    assert not [name for name, tensor in before.items() if torch.equal(tensor, after[name])]


def test_the_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    result = tiny_run(tmp_path).train(steps=40, learning_rate=3e-3)
    assert result.heldout_kl[1] < 0.7 * result.heldout_kl[0]


def test_the_manifest_knows_no_place_and_no_time(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    manifest = json.loads((run.train(steps=2).output / "upcycle.json").read_text())
    assert str(tmp_path) not in json.dumps(manifest)
    assert manifest["stage"] == "train"
    assert manifest["options"]["learning_rate"] == 1e-3
    assert manifest["options"]["data"] == ["text.jsonl"]
    assert set(manifest["source"]) == {"student", "teacher", "rows", "text", "origin"}


def test_an_output_that_exists(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"):
        run.train()
    assert not (tmp_path / "out-training").exists()


def test_renamed_tensors_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    path = run.student / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TrainingError, match=r"has no tensor of that name") as caught:
        run.train()
    assert caught.value.fix.startswith("load the source with transformers and save it again")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_stored_one_by_one_leave_the_attention_to_train(
    tmp_path: Path, model_type: str
) -> None:
    """transformers holds the experts of a layer in one weight and renames a router."""
    run = tiny_run(tmp_path, model_type=model_type)
    with pytest.raises(TrainingError, match=r"weight model\.layers\.\d\.mlp\.") as caught:
        run.train(steps=2)
    assert caught.value.fix.startswith("set train.trainable to attention or kv")
    before = load_file(run.student / "model.safetensors")
    after = load_file(run.train(steps=2, trainable="attention").output / "model.safetensors")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(".self_attn." in name for name in moved)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    shutil.rmtree(run.teacher)
    other = tmp_path / "other"
    other.mkdir()
    tiny_run(other, vocab_size=300).teacher.rename(run.teacher)
    with pytest.raises(TrainingError, match="token ids reach"):
        run.train()


def test_overflow_of_the_stored_dtype_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, dtype=torch.float16)
    with pytest.raises(TrainingError, match=r"which torch\.float16 cannot hold"):
        run.train(steps=1, learning_rate=1e5, warmup_steps=0, trainable="kv")
    assert not (tmp_path / "out").exists()
