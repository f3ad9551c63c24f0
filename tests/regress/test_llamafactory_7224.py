"""hiyouga/LLaMA-Factory#7224: an `auto_map` left in config.json by a downloaded Phi-3.

transformers has had the class for long, and the code that the folder names is stale. It is never
run; the output names none.
"""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.families.retarget_sources import source_checkpoint
from tests.regress.folders import get_config, load, logits, set_config
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.sidecars import remove_top_level
from upcycle.cli.app import COMMANDS, app
from upcycle.conversion.verify import verify
from upcycle.errors import FamilyError, StrictError, UpcycleWarning
from upcycle.planning import plan

WEIGHTS = "model.safetensors"
AUTO_MAP = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
for _name in COMMANDS:  # each registers itself
    import_module(f"upcycle.cli.{_name.replace('-', '_')}")

BOOM = "raise RuntimeError('remote code was run')\n"


def with_code(source: Path, auto_map: Any = AUTO_MAP) -> Path:
    """A folder as it is downloaded: the key, and the files that it names."""
    config = get_config(source)
    (source / "config.json").write_text(json.dumps({"auto_map": auto_map, **config}, indent=2))
    (source / "configuration_phi3.py").write_text(BOOM)
    (source / "modeling_phi3.py").write_text(f"from .masks_phi3 import mask\n{BOOM}")
    (source / "masks_phi3.py").write_text(BOOM)
    (source / "sample_finetune.py").write_text(BOOM)
    return source


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_code(tiny_checkpoint(tmp_path_factory.mktemp("phi3") / "source", "phi3"))


def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout or "{}"), result.stderr


def test_the_output_names_no_code_and_has_none(tmp_path: Path, phi3: Path) -> None:
    expected = logits(load(phi3))
    with pytest.warns(UpcycleWarning, match=r"modeling_phi3|configuration_phi3") as told:
        result = convert(phi3, tmp_path / "out", kv_heads=8)
    assert "never run" in str(told[0].message)
    written = (tmp_path / "out/config.json").read_text()
    assert written == remove_top_level((phi3 / "config.json").read_text(), "auto_map")
    assert "auto_map" not in written
    code = ["configuration_phi3.py", "masks_phi3.py", "modeling_phi3.py"]
    assert sorted(result.left_behind) == code
    assert [path.name for path in (tmp_path / "out").glob("*.py")] == ["sample_finetune.py"]
    assert torch.equal(logits(load(tmp_path / "out")), expected)
    assert result.manifest.document["result"]["warnings"] == [str(told[0].message)]


def test_strict_says_what_to_remove(tmp_path: Path, phi3: Path) -> None:
    with pytest.raises(StrictError, match="names code") as caught:
        convert(phi3, tmp_path / "out", kv_heads=2, strict=True)
    assert caught.value.fix.startswith("remove auto_map from config.json")


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_conversion_is_verified(tmp_path: Path, phi3: Path, kv_heads: int) -> None:
    with pytest.warns(UpcycleWarning):
        convert(phi3, tmp_path / "out", kv_heads=kv_heads)
    with pytest.warns(UpcycleWarning):
        found = verify(phi3, tmp_path / "out")
    assert found.passed, [check for check in found.checks if not check.passed]
    changed = next(check for check in found.checks if "config.json" in check.name)
    assert changed.detail.endswith("auto_map (removed)")
    set_config(tmp_path / "out", auto_map=AUTO_MAP)
    with pytest.warns(UpcycleWarning):
        found = verify(phi3, tmp_path / "out")
    assert not next(check for check in found.checks if "planned keys" in check.name).passed


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "SRC", "--kv-heads", "2"),
        ("inspect", "SRC"),
        ("capacity", "SRC", "--gpu-memory", "1GiB"),
        ("predict", "SRC", "--calibration-tokens", "256"),
        ("sweep", "SRC", "--kv-heads", "2", "--max-tokens", "128", "--sequence-length", "64"),
        ("convert", "SRC", "OUT", "--kv-heads", "2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_goes_on_and_warns_once(
    tmp_path: Path, phi3: Path, arguments: tuple[str, ...]
) -> None:
    places = {"SRC": phi3, "OUT": tmp_path / "out"}
    code, document, stderr = run(*(places.get(word, word) for word in arguments))
    assert code == 0, stderr
    assert stderr.count("warning: auto_map in ") == 1
    assert sum(text.startswith("auto_map in ") for text in document["warnings"]) == 1


def test_eval_goes_on(tmp_path: Path, phi3: Path) -> None:
    with pytest.warns(UpcycleWarning):
        convert(phi3, tmp_path / "out", kv_heads=2)
    code, document, stderr = run(
        *("eval", phi3, tmp_path / "out", "--out", tmp_path / "report"),
        *("--max-tokens", 256, "--sequence-length", 64),
    )
    assert code in (0, 1), stderr
    assert document["warnings"]


def test_a_tokenizer_keeps_the_code_that_it_needs(tmp_path: Path) -> None:
    tokenizer = {"AutoTokenizer": ["tokenization_phi3.Phi3Tokenizer", None]}
    source = with_code(tiny_checkpoint(tmp_path / "source", "phi3"), {**AUTO_MAP, **tokenizer})
    (source / "tokenization_phi3.py").write_text("from .configuration_phi3 import Phi3Config\n")
    with pytest.warns(UpcycleWarning):
        convert(source, tmp_path / "out", kv_heads=2)
    assert get_config(tmp_path / "out")["auto_map"] == tokenizer
    assert len(list((tmp_path / "out").glob("*.py"))) == 5


def test_code_that_a_tokenizer_configuration_names_stays_too(tmp_path: Path) -> None:
    source = with_code(tiny_checkpoint(tmp_path / "source", "phi3"))
    path = source / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["tokenization_phi3.Phi3Tokenizer", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    with pytest.warns(UpcycleWarning):
        convert(source, tmp_path / "out", kv_heads=2)
    assert "auto_map" not in get_config(tmp_path / "out")
    assert (tmp_path / "out/configuration_phi3.py").is_file()


@pytest.mark.parametrize(
    "auto_map",
    [
        "modeling_phi3.Phi3Model",
        {"AutoModel": "someone/else--modeling_phi3.Phi3Model"},
        {"AutoModelForSequenceClassification": "modeling_phi3.Head", "AutoConfig": "c.C"},
    ],
)
def test_other_forms_of_the_key(tmp_path: Path, auto_map: Any) -> None:
    source = with_code(tiny_checkpoint(tmp_path / "source", "llama"), auto_map)
    with pytest.warns(UpcycleWarning, match="names code for the model"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert "auto_map" not in get_config(tmp_path / "out")


def test_what_a_tokenizer_alone_needs_stays_as_it_is(tmp_path: Path) -> None:
    tokenizer = {"AutoTokenizer": ["t.T", None]}
    source = with_code(tiny_checkpoint(tmp_path / "source", "llama"), tokenizer)
    todo = plan(source, kv_heads=8)
    assert (todo.config_edits, todo.config_removed) == ({}, ())
    convert(source, tmp_path / "out", kv_heads=8, strict=True)
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()
    assert len(list((tmp_path / "out").glob("*.py"))) == 4


@pytest.mark.parametrize("auto_map", [None, {}])
def test_a_key_without_a_name_goes_in_silence(tmp_path: Path, auto_map: Any) -> None:
    """transformers itself cannot read a null there."""
    source = with_code(tiny_checkpoint(tmp_path / "source", "llama"), auto_map)
    convert(source, tmp_path / "out", kv_heads=8, strict=True)
    assert "auto_map" not in get_config(tmp_path / "out")
    assert load(tmp_path / "out").config.num_key_value_heads == 8


def test_a_class_that_is_retargeted_loses_its_code_too(tmp_path: Path) -> None:
    source = with_code(source_checkpoint(tmp_path / "source", "gpt2"))
    with pytest.warns(UpcycleWarning, match="transformers' own gpt2"):
        convert(source, tmp_path / "out", kv_heads=1)
    assert "auto_map" not in get_config(tmp_path / "out")
    assert not (tmp_path / "out/modeling_phi3.py").exists()


def test_tensors_that_do_not_fit_are_refused_for_the_code(tmp_path: Path) -> None:
    """A type of that name whose attention is another: its code alone knows."""
    source = with_code(tiny_checkpoint(tmp_path / "source", "phi3"))
    tensors = load_file(source / WEIGHTS)
    renamed = {name.replace("qkv_proj", "query_key_value"): t for name, t in tensors.items()}
    save_file(renamed, source / WEIGHTS, metadata={"format": "pt"})
    for look in (
        lambda: plan(source, kv_heads=2),
        lambda: convert(source, tmp_path / "out", kv_heads=2),
    ):
        with pytest.raises(FamilyError, match="names remote code for the model") as caught:
            look()
        assert "does not fit: tensor model.layers.0.self_attn.query_key_value" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_an_mlp_that_does_not_fit_is_refused_for_the_code(tmp_path: Path) -> None:
    source = with_code(tiny_checkpoint(tmp_path / "source", "phi3"))
    tensors = load_file(source / WEIGHTS)
    renamed = {name.replace("gate_up_proj", "experts.w1"): t for name, t in tensors.items()}
    save_file(renamed, source / WEIGHTS, metadata={"format": "pt"})
    with (
        pytest.warns(UpcycleWarning),  # the attention fits
        pytest.raises(FamilyError, match="transformers' own phi3 does not fit") as caught,
    ):
        convert(source, tmp_path / "out", kv_heads=2)
    assert "model.layers.0.mlp.gate_up_proj.weight" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_a_type_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    source = with_code(tiny_checkpoint(tmp_path / "source", "phi3"))
    for model_type in ("phi3small", "phi3_of_mine"):
        set_config(source, model_type=model_type)
        with pytest.raises(FamilyError, match=model_type):
            plan(Checkpoint.open(source), kv_heads=2)


@pytest.mark.parametrize(
    ("text", "key", "left"),
    [
        ('{"a": 1, "b": {"c": 2}}', "a", '{"b": {"c": 2}}'),
        ('{"a": 1, "b": {"c": 2}}', "b", '{"a": 1}'),
        ('{\n  "a": 1,\n  "b": 2,\n  "c": 3\n}\n', "b", '{\n  "a": 1,\n  "c": 3\n}\n'),
        ('{"a": 1 }', "a", "{ }"),
        ('{"a": 1}', "z", '{"a": 1}'),
    ],
)
def test_a_key_is_removed_and_every_other_byte_stays(text: str, key: str, left: str) -> None:
    assert remove_top_level(text, key) == left


def test_a_converted_folder_needs_no_source_code(tmp_path: Path, phi3: Path) -> None:
    with pytest.warns(UpcycleWarning):
        convert(phi3, tmp_path / "out", kv_heads=2)
    moved = Path(shutil.move(tmp_path / "out", tmp_path / "elsewhere"))
    assert load(moved).config.num_key_value_heads == 2


def test_strict_says_it_once(tmp_path: Path, phi3: Path) -> None:
    arguments = ["convert", str(phi3), str(tmp_path / "out"), "--kv-heads", "2"]
    for words, code in ((["--strict"], 1), ([], 0)):
        result = CliRunner().invoke(app, [*arguments, *words])
        assert result.exit_code == code, result.output
        assert result.stderr.count("names code for the model") == 1
