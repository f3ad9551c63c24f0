"""What a newcomer meets first: help, version, a recipe of one's own, progress in a log."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from tests.families.retarget_sources import source_checkpoint
from tests.tiny import tiny_checkpoint
from upcycle.cli import demo as _demo  # noqa: F401 - registers the command
from upcycle.cli.app import COMMANDS, app
from upcycle.cli.init import DEMO, shipped_recipes
from upcycle.cli.progress_lines import line_of, progress_lines
from upcycle.errors import RecipeError
from upcycle.options import convert, evaluate, export, train
from upcycle.options.base import Section
from upcycle.progress import Progress
from upcycle.recipe.loading import load_recipe
from upcycle.recipe.schema import Recipe
from upcycle.recipe.template import recipe_text
from upcycle.version import __version__


def upcycle(*arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upcycle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("manners") / "source")


def test_the_version() -> None:
    done = upcycle("--version")
    assert (done.returncode, done.stdout) == (0, f"upcycle {__version__}\n")


def test_help_gives_whole_summaries() -> None:
    shown = upcycle("-h").stdout
    assert shown == upcycle("--help").stdout
    commands = shown.partition("Commands:")[2]
    assert "..." not in commands
    listed = re.findall(r"^  ([a-z-]+) ", commands, re.MULTILINE)
    assert listed == list(COMMANDS)


def test_usage_names_the_arguments_as_the_text_does() -> None:
    assert "convert [OPTIONS] {SRC} {OUT}" in upcycle("convert", "-h").stdout


def test_init_writes_a_recipe_for_a_checkpoint_of_ones_own(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("some text\n")
    done = upcycle("init", tmp_path / "new", "--source", source, "--text", text)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "new" / "recipe.yaml"
    recipe = load_recipe(path)
    assert recipe.source == str(source)
    assert recipe.output == tmp_path / "new" / "run"
    assert recipe.convert.kv_heads == 2  # a quarter of 8
    assert recipe.train is not None
    assert [each.path for each in recipe.train.data.sources] == [text]
    assert " The source has 8; valid: 1, 2, 4, 8." in path.read_text()
    again = upcycle("init", tmp_path / "new", "--source", source)
    assert again.returncode == 2
    assert f"{path} is there already" in again.stderr


def test_init_refuses_in_the_words_of_convert(source: Path, tmp_path: Path) -> None:
    done = upcycle("init", tmp_path / "new", "--source", source, "--kv-heads", 3)
    assert done.returncode == 2
    assert "cannot make 3 KV heads from 8 query heads and 8 KV heads" in done.stderr
    assert not (tmp_path / "new").exists()
    done = upcycle("init", tmp_path / "new")
    assert (done.returncode, "--source" in done.stderr) == (2, True)


def test_every_key_of_a_template_is_one_of_recipes() -> None:
    """What is a comment in it becomes a valid recipe when it is none any more."""
    values = {"source": "m", "output": "o", "convert": {"kv_heads": 2}}
    assert Recipe.model_validate(yaml.safe_load(recipe_text(values, {})))
    keys = set(re.findall(r"^ *(?:# )?([a-z_0-9]+):", recipe_text(values, {}), re.MULTILINE))
    for section in (Recipe, *_sections()):
        assert set(section.model_fields) <= keys


def _sections() -> list[type[BaseModel]]:
    """Every section of recipes, however deep."""
    rooms = (convert, evaluate, export, train)
    kinds = [kind for room in rooms for kind in vars(room).values()]
    sections = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
    return [section for section in set(sections) if section not in (Section, train.TextSource)]


def test_the_length_of_rows_is_what_the_class_takes(tmp_path: Path) -> None:
    """GPT-2 calls its positions n_positions."""
    source = source_checkpoint(tmp_path / "source", "gpt2")
    assert "max_position_embeddings" not in json.loads((source / "config.json").read_text())
    assert upcycle("init", tmp_path / "new", "--source", source).returncode == 0
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.train is not None
    assert recipe.train.sequence_length == 64
    assert recipe.evaluate.sequence_length == 64


def test_the_demo_has_its_own_checkpoint(tmp_path: Path) -> None:
    done = upcycle("init", tmp_path / "new", "--demo", "--kv-heads", 2)
    assert (done.returncode, "pass --demo alone" in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["demo-out", "2026", "no: 1"])
def test_the_demo_goes_where_it_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str]] = []

    def stop(recipe: Recipe, *, command: str, **_: Any) -> None:
        asked.append((recipe.output, command))
        raise RecipeError("stopped", where="here", fix="go on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upcycle.pipeline.run", stop)
    done = CliRunner().invoke(app, ["demo", name])
    assert done.exit_code == 2
    ((output, command),) = asked
    assert output == tmp_path / name
    words = shlex.split(command)  # what makes the report again, and names the recipe to train
    assert words[:2] == ["upcycle", "run"]
    assert load_recipe(words[2], words[3:]).output == output


def test_the_demo_can_be_written_anywhere(tmp_path: Path) -> None:
    done = upcycle("init", "recipes", "--demo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(tmp_path / "recipes" / DEMO)
    shipped = load_recipe(shipped_recipes() / DEMO)
    assert recipe.source == str(tmp_path / "recipes" / "demo-source")
    assert recipe.convert == shipped.convert
    copied = {f.relative_to(tmp_path / "recipes") for f in tmp_path.rglob("recipes/demo-*/*")}
    assert len(copied) == 10
    for file in copied:
        assert (tmp_path / "recipes" / file).read_bytes() == (shipped_recipes() / file).read_bytes()
    assert upcycle("init", "recipes", "--demo", folder=tmp_path).returncode == 2


def test_a_recipe_shown_is_the_same_recipe(tmp_path: Path) -> None:
    demo = shipped_recipes() / DEMO
    done = upcycle("recipe", "show", demo, "train.steps=3", "train.fraction=null",
                   "train.source_steps=null", "train.warmup_steps=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = tmp_path / "shown.yaml"
    path.write_text(done.stdout)
    changes = ["train.steps=3", "train.fraction=null", "train.source_steps=null"]
    changes += ["train.warmup_steps=1"]
    assert load_recipe(path) == load_recipe(demo, changes)


def test_the_schema_is_of_recipes() -> None:
    done = upcycle("recipe", "schema")
    assert json.loads(done.stdout) == Recipe.model_json_schema()
    assert json.loads(upcycle("recipe", "schema", "--json").stdout) == Recipe.model_json_schema()
    assert upcycle("recipe", "show").returncode == 2


def test_a_bare_path_is_a_text_source(tmp_path: Path) -> None:
    text = shipped_recipes() / DEMO
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        text.read_text()
        .replace("- path: demo-text/train.parquet", "- mine.txt")
        .replace("source: demo-source", f"source: {shipped_recipes() / 'demo-source'}")
    )
    loaded = load_recipe(recipe)
    assert loaded.train is not None
    assert loaded.train.data.sources[0].path == tmp_path / "mine.txt"
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, ["train.data.sources=[3]"])
    assert "keys of its own (path), not 3" in caught.value.what


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines(every=0.05) as watch:
        watch(Progress("train", 5, 20, "steps", "loss 1.5"))
        deadline = time.monotonic() + 10
        while not (told := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.match(
        r"\d\d:\d\d:\d\d train 25% \(5 of 20 steps\), loss 1.5, 0:00 so far, about 0:0\d left\n",
        told,
    )


def test_a_line_tells_the_time_that_is_left() -> None:
    latest = Progress("convert", 250, 1000, "B", "model.safetensors")
    line = line_of(latest, since=100.0, began=90.0, now=3800.0)
    assert line[9:] == "convert 25%, model.safetensors, 1:01:50 so far, about 3:05:00 left"


def test_short_work_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines() as watch:
        watch(Progress("verify", 1, 2, "checks"))
    assert capsys.readouterr().err == ""
