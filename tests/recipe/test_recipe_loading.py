"""From files and overrides to a checked recipe, and every problem at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from upcycle.errors import RecipeError
from upcycle.recipe.loading import load_recipe
from upcycle.recipe.schema import Recipe

TRAIN = {
    "data": {"sources": [{"path": "text/a.jsonl"}]},
    "sequence_length": 64,
    "batch_size": 4,
    "micro_batch_size": 2,
    "steps": 10,
    "learning_rate": 1e-3,
}


def write(folder: Path, **changes: Any) -> Path:
    document = {
        "source": "./model",
        "output": "../runs/x",
        "convert": {"kv_heads": 2},
        "train": TRAIN,
        **changes,
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, evaluate={"text": ["b.txt"]}))
    assert recipe.source == str(tmp_path / "model")
    assert recipe.output == tmp_path.parent / "runs" / "x"
    assert recipe.train is not None
    assert recipe.train.data.sources[0].path == tmp_path / "text" / "a.jsonl"
    assert recipe.evaluate.text == (tmp_path / "b.txt",)


def test_override_paths_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    recipe = load_recipe(
        write(tmp_path), ["output=out", "train.data.sources.0.path=c.txt", "evaluate.text=[d.md]"]
    )
    assert recipe.output == here / "out"
    assert recipe.train is not None
    assert recipe.train.data.sources[0].path == here / "c.txt"
    assert recipe.evaluate.text == (here / "d.md",)


@pytest.mark.parametrize(
    ("source", "exists", "stays"),
    [
        ("org/model", False, True),
        ("org/model", True, False),
        ("gpt2", False, False),
        ("./gpt2", False, False),
        ("/abs/model", False, False),
        ("a/b/c", False, False),
    ],
)
def test_a_source_is_a_folder_or_a_hub_id(
    tmp_path: Path, source: str, exists: bool, stays: bool
) -> None:
    if exists:
        (tmp_path / source).mkdir(parents=True)
    recipe = load_recipe(write(tmp_path, source=source))
    assert recipe.source == (source if stays else str((tmp_path / source).resolve()))


def test_overrides_are_typed_by_the_yaml_rules(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path),
        ["train.learning_rate=1e-5", "train.betas=[0.8, 0.9]", "evaluate.margins.kl_mean=0.1"],
    )
    assert recipe.train is not None
    assert (recipe.train.learning_rate, recipe.train.betas) == (1e-5, (0.8, 0.9))
    assert recipe.evaluate.margins.kl_mean == 0.1


@pytest.mark.parametrize(
    ("fraction", "source_steps", "steps"), [(0.05, 5000, 250), (0.01, 149, 1), (1e-6, 10, 1)]
)
def test_steps_by_fraction(tmp_path: Path, fraction: float, source_steps: int, steps: int) -> None:
    train = {**TRAIN, "steps": None, "fraction": fraction, "source_steps": source_steps}
    recipe = load_recipe(write(tmp_path, train=train))
    assert recipe.train is not None
    assert recipe.train.num_steps == steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fraction": 0.1, "source_steps": 10}, "give either steps, or fraction"),
        ({"steps": None}, "give either steps, or fraction"),
        ({"steps": None, "fraction": 0.1}, "give either steps, or fraction"),
        ({"source_steps": 100}, "give either steps, or fraction"),
        ({"warmup_steps": 11}, "warmup_steps (11) must not exceed the 10 steps"),
        ({"batch_size": 5}, "batch_size (5) must be a multiple of micro_batch_size (2)"),
        ({"distillation": 0.0}, "must not both be 0"),
        ({"learning_rate": 0}, "greater than 0, not 0"),
        ({"learning_rate": float("nan")}, "finite number"),
        ({"steps": True}, "valid integer, not True"),
        ({"steps": "10"}, "valid integer, not '10'"),
        ({"schedule": "step"}, "'cosine', 'linear', 'wsd' or 'constant', not 'step'"),
        ({"betas": [0.9, 1.0]}, "less than 1"),
        ({"betas": [0.9]}, "required"),
        ({"data": {"sources": []}}, "at least 1 item"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, train={**TRAIN, **changes}))
    assert message in caught.value.what
    assert caught.value.where.startswith("r.yaml:")


def test_every_problem_is_reported_with_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "source: m\n"
        "output: o\n"
        "convert: {kv_heads: two, kv_heads: 3}\n"
        "train:\n"
        "  data:\n"
        "    sources:\n"
        "      - {pth: a.txt}\n"
        "  learnig_rate: 1e-3\n"
        "  sequence_length: 64\n"
        "exprot: {}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["train.steps=x", "nonsense", "convert.sed=1"])
    first, *problems, where, fix = str(caught.value).splitlines()
    assert first == "12 problems in bad.yaml"
    assert len(problems) == 12
    assert all(problem.startswith("  - ") for problem in problems)
    what = "\n".join(problems)
    assert where == f"  where: {path}"
    assert fix.startswith("  fix: ")
    for expected in (
        "bad.yaml:3: convert.kv_heads: given twice; the first is on line 3",
        "bad.yaml:3: convert.kv_heads: should be a valid integer, unable to parse",
        "bad.yaml:7: train.data.sources.0.pth: unknown key; did you mean 'path'?",
        "bad.yaml:7: train.data.sources.0.path: this key is required",
        "bad.yaml:8: train.learnig_rate: unknown key; did you mean 'learning_rate'?",
        "bad.yaml:4: train.batch_size: this key is required",
        "bad.yaml:10: exprot: unknown key; did you mean 'export'?",
        "override 'train.steps=x': should be a valid integer",
        "override 'nonsense': must be section.key=value",
        "override 'convert.sed=1': unknown key; did you mean 'seed'?",
    ):
        assert expected.split(", unable")[0] in what


@pytest.mark.parametrize("text", ["", "- 1\n", "just text"])
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="must be a mapping"):
        load_recipe(path)


@pytest.mark.parametrize(
    "override", ["train.data.sources.7.path=x", "train.steps.x=1", "=3", "train.steps"]
)
def test_an_override_that_fits_nowhere(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path), [override])
    assert caught.value.where == f"override {override!r}"


def test_there_is_no_such_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / "none.yaml")


PYTHON_RECIPE = """
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.recipe.schema import Recipe

def recipe():
    return Recipe(
        source="./model", output="out", convert=ConvertOptions(kv_heads=2),
        evaluate=EvaluateOptions(text=("a.txt",), prompts=("x",)),
    )
"""


def test_a_python_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text(PYTHON_RECIPE)
    recipe = load_recipe(path, ["convert.kv_heads=1", "evaluate.new_tokens=3"])
    assert recipe.source == str(tmp_path / "model")
    assert recipe.output == tmp_path / "out"
    assert recipe.convert.kv_heads == 1
    assert (recipe.evaluate.text, recipe.evaluate.new_tokens) == ((tmp_path / "a.txt",), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no attribute 'recipe'"),
        ("def recipe(): return 3", r"recipe\(\) returned int"),
        ("def recipe(:", "SyntaxError"),
        (PYTHON_RECIPE.replace("kv_heads=2", "kv_heads=2, seed=-1"), "or equal to 0, not -1"),
    ],
)
def test_a_broken_python_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.py"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("import os\n1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("import sys\n\ndef recipe():\n    sys.exit(3)\n", "SystemExit: 3", 4),
        ("def helper():\n    raise OSError('a\\nb')\n\nrecipe = helper\n", "OSError: a b", 2),
        ("x = 1\ndef recipe(:\n", "SyntaxError", 2),
        ("import no_such_module_here", "ModuleNotFoundError", 1),
    ],
)
def test_code_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, line: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe("r.py")
    assert caught.value.where == f"r.py:{line}"
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("section", ["convert", "train"])
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_has_32_bits(tmp_path: Path, section: str, seed: int) -> None:
    path = write(tmp_path)
    load_recipe(path, [f"{section}.seed={2**32 - 1}"])
    with pytest.raises(RecipeError, match=r"should be (less|greater) than or equal to"):
        load_recipe(path, [f"{section}.seed={seed}"])


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        recipe.source = "other"  # type: ignore[misc]


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import json, sys\nfrom upcycle.recipe.loading import load_recipe\n"
        f"load_recipe({str(write(tmp_path))!r})\n"
        "print(json.dumps([m for m in ('torch', 'transformers', 'datasets', 'accelerate')"
        " if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe)
    assert Path(recipe.source).is_dir()
    for source in recipe.train.data.sources if recipe.train else ():
        assert source.path.exists(), source.path


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-that-name/x", "x" * 300])
@pytest.mark.parametrize("key", ["source", "output", "train.data.sources.0.path"])
def test_a_path_that_no_file_system_has(tmp_path: Path, path: str, key: str) -> None:
    recipe = write(tmp_path)
    override = f"{key}={json.dumps(path)}"
    with pytest.raises(RecipeError, match="no path can be") as caught:
        load_recipe(recipe, [override])
    assert caught.value.where == f"override {override!r}"
    if key != "train.data.sources.0.path":
        with pytest.raises(RecipeError, match="no path can be") as caught:
            load_recipe(write(tmp_path, **{key: path}))
        assert key in caught.value.where


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_recipe_that_is_not_utf_8(tmp_path: Path, encoding: str) -> None:
    """Its paths would be others, with U+FFFD in them."""
    path = tmp_path / "r.yaml"
    path.write_bytes("# one\noutput: caf\xe9\nsource: s\nconvert: {kv_heads: 2}\n".encode(encoding))
    line = "0xe9 on line 2" if encoding == "latin-1" else "0xff on line 1"
    with pytest.raises(RecipeError, match=f"not UTF-8: byte {line}"):
        load_recipe(path)


def test_an_override_of_a_path_in_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    assert load_recipe(write(tmp_path), [f"output={tmp_path / name}"]).output == tmp_path / name
    with pytest.raises(RecipeError, match="integer"):
        load_recipe(write(tmp_path), [f"convert.kv_heads={name}"])


def test_a_recipe_of_too_long_a_name() -> None:
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe("x" * 300 + ".yaml")


def test_an_override_of_a_wrong_tag(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is no int"):
        load_recipe(write(tmp_path), ["train.steps=!!int ''"])
