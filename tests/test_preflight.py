"""`doctor` finds what a run would stumble over."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.training.runs import TinyRun, tiny_run
from upcycle.conversion.class_check import check_class
from upcycle.errors import CheckpointError, UpcycleWarning
from upcycle.pipeline import run as run_recipe
from upcycle.pipeline.preflight import PreflightCheck, preflight
from upcycle.recipe.loading import load_recipe


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)


def recipe_file(run: TinyRun, **changes: Any) -> Path:
    document = {
        "source": str(run.teacher),
        "output": str(run.folder / "runs" / "x"),
        "convert": {"kv_heads": 2},
        "train": json.loads(run.recipe().model_dump_json(exclude_none=True)),
        "evaluate": {"sequence_length": 64, "max_tokens": 100},
        **changes,
    }
    path = run.folder / "r.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def failures(path: Path) -> list[PreflightCheck]:
    return [check for check in preflight(path) if not check.passed]


def test_a_good_recipe_passes(run: TinyRun) -> None:
    checks = list(preflight(recipe_file(run)))
    assert [check.name for check in checks if not check.passed] == []
    assert [check.name for check in checks][3:] == [
        "recipe and source",
        "launch",
        "inputs and output",
        "conversion",
        "class",
        "language model",
        "context",
        "evaluation text",
        "trained weights",
        "training text",
        "tokenizer",
        "generation config",
        "disk space",
        "packed rows",
    ]


def test_the_installation_alone() -> None:
    checks = list(preflight())
    assert [check.name for check in checks] == ["versions", "device", "packaged texts"]
    assert all(check.passed for check in checks)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_wrong_is_named(run: TinyRun) -> None:
    edit(run.teacher / "generation_config.json", temperature=0.5, do_sample=False)
    # The weights keep their rows, so the model cannot be loaded, and its ids do not fit.
    edit(run.teacher / "config.json", vocab_size=200)
    run.text.write_text("{broken\n")
    found = {
        check.name: check.detail for check in failures(recipe_file(run, convert={"kv_heads": 3}))
    }
    assert set(found) == {
        "conversion",
        "class",
        "tokenizer",
        "generation config",
        "trained weights",
        "training text",
        "packed rows",
    }
    assert "choose one of 1, 2, 4, 8" in found["conversion"]
    assert "model.embed_tokens.weight is [260, " in found["class"]
    assert "ids reach 256, the model embeds 200" in found["tokenizer"]
    assert "save_pretrained() would refuse it" in found["generation config"]
    assert "text.jsonl:1: not JSON" in found["training text"]


def test_a_full_disk(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000, "total": 1000, "used": 0})
    )
    (failed,) = failures(recipe_file(run))
    assert failed.name == "disk space"
    assert "0.00 GiB free" in failed.detail


@pytest.mark.parametrize("changes", [{"convert": {}}, {"source": "/nowhere"}])
def test_no_recipe_or_no_source_ends_it(run: TinyRun, changes: dict[str, Any]) -> None:
    (failed,) = failures(recipe_file(run, **changes))
    assert failed.name == "recipe and source"


def test_a_source_of_an_unknown_class_is_named(run: TinyRun) -> None:
    edit(run.teacher / "config.json", model_type="nothing-known")
    found = {check.name for check in failures(recipe_file(run))}
    assert {"conversion", "context", "tokenizer", "packed rows"} <= found


def test_code_of_its_own_that_is_not_needed_fails_nothing(run: TinyRun) -> None:
    edit(run.teacher / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.Llama"})
    with pytest.warns(UpcycleWarning, match="names code for the model"):
        assert failures(recipe_file(run)) == []


def test_tensors_that_loading_ignores_fail_here_and_are_warned_of_in_a_run(run: TinyRun) -> None:
    path = run.teacher / "model.safetensors"
    extra = {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    (failed,) = failures(recipe_file(run))
    assert failed.name == "class"
    assert "1 unexpected, which loading ignores: model.layers.9.mlp.up_proj" in failed.detail
    with pytest.warns(UpcycleWarning, match="1 unexpected"):
        assert check_class(run.teacher).startswith("22 tensors, as LlamaForCausalLM has them")


def test_a_run_compares_the_class_before_its_first_stage(run: TinyRun) -> None:
    path = run.teacher / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    recipe = load_recipe(recipe_file(run))
    with pytest.raises(CheckpointError, match=r"1 missing.*: model\.norm\.weight \[64\]"):
        run_recipe(recipe, command="upcycle run")
    assert not recipe.output.exists()


def test_overrides_are_checked_as_a_run_would_take_them(run: TinyRun) -> None:
    path = recipe_file(run)
    assert not [check for check in preflight(path, ["convert.kv_heads=4"]) if not check.passed]
    (failed,) = [check for check in preflight(path, ["convert.kv_heads=5"]) if not check.passed]
    assert failed.name == "conversion"


def test_the_share_of_targets_is_told(run: TinyRun) -> None:
    (found,) = [check for check in preflight(recipe_file(run)) if check.name == "training text"]
    assert re.search(r"; [\d,]+ of [\d,]+ tokens \(9\d\.\d%\) are targets$", found.detail)


def test_a_tied_embedding_is_written_back(tmp_path: Path) -> None:
    assert failures(recipe_file(tiny_run(tmp_path, tie_word_embeddings=True))) == []


@pytest.mark.parametrize(("trainable", "named"), [("all", ["trained weights"]), ("attention", [])])
def test_weights_that_cannot_be_written_back_are_refused_before_anything_is_converted(
    tmp_path: Path, trainable: str, named: list[str]
) -> None:
    run = tiny_run(tmp_path, model_type="mixtral")
    path = recipe_file(run)
    overrides = [f"train.trainable={trainable}"]
    assert [check.name for check in preflight(path, overrides) if not check.passed] == named
