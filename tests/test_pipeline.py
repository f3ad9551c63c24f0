"""`upcycle run`: every stage once, again only where something that it reads changed."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder
from upcycle.checkpoint.staging import locked
from upcycle.cli import main
from upcycle.cli.console import Console
from upcycle.cli.run import run_command
from upcycle.errors import (
    DataError,
    EvaluationError,
    ExportError,
    OutputError,
    PlanError,
    TrainingError,
    UpcycleError,
)
from upcycle.pipeline import RunResult, run
from upcycle.pipeline.preflight import preflight
from upcycle.progress import Progress
from upcycle.recipe.loading import load_recipe

RECIPE = """
source: source
output: out
convert: {kv_heads: 2}
train:
  data: {sources: [{path: text.jsonl}]}
  sequence_length: 32
  batch_size: 2
  micro_batch_size: 2
  steps: 4
  learning_rate: 1.0e-3
  precision: fp32
  checkpoint_every: 1
evaluate:
  text: [text.jsonl]
  max_tokens: 200
  sequence_length: 32
  prompts: ["ab"]
  new_tokens: 4
export: {context: 32}
"""


ALL = ["convert", "train", "evaluate", "export", "report"]
SHORT = ["convert", "evaluate", "report"]
SAME_SIZE = b"other bytes of the same size"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "source")
    lines = [json.dumps({"text": f"row {i} of a small text, {i * i}"}) for i in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def short_recipe(recipe: Path) -> Path:
    """Without training and export."""
    text = RECIPE.split("train:")[0] + "evaluate: {text: [text.jsonl], max_tokens: 100, "
    recipe.write_text(text + "sequence_length: 32}\n")
    return recipe


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def run_it(path: Path, *overrides: str, overwrite: bool = False) -> tuple[RunResult, list[str]]:
    """The result, and the stages that ran."""
    ran: list[str] = []

    def announce(stage: str, skipped: bool) -> None:
        if not skipped:
            ran.append(stage)

    recipe = load_recipe(path, overrides)
    return run(recipe, command="upcycle run", overwrite=overwrite, announce=announce), ran


def test_a_run_makes_everything_and_a_second_one_nothing(recipe: Path) -> None:
    result, ran = run_it(recipe)
    assert ran == ALL
    labels = [model.label for model in result.report.comparison.models]
    assert labels == ["source", "converted", "uptrained"]
    assert result.report.export is not None
    assert result.report.export.kv_tiles == 0
    assert result.report.training is not None
    assert result.report.training.steps == 4
    assert result.package is not None
    assert result.package.is_dir()
    before = hash_folder(result.layout.output)

    again, ran = run_it(recipe)
    assert ran == []
    assert again.report == result.report
    assert hash_folder(result.layout.output) == before


def test_a_changed_option_runs_what_depends_on_it(recipe: Path) -> None:
    run_it(recipe)
    assert run_it(recipe, "export.context=64")[1] == ["export", "report"]
    result, ran = run_it(recipe, "export.context=64", "evaluate.max_tokens=100")
    assert ran == ["evaluate", "report"]
    assert result.report.export is not None
    assert result.report.export.context == 64, "the new report has the export's section too"
    before = hash_folder(result.layout.output)
    with pytest.raises(TrainingError, match="kv_heads was 2 and is 4"):
        run_it(recipe, "export.context=64", "convert.kv_heads=4")
    assert hash_folder(result.layout.output) == before, "what was trained is not thrown away"
    changed = ("export.context=64", "convert.kv_heads=4")
    assert run_it(recipe, *changed, overwrite=True)[1] == ALL
    recipe.write_text(RECIPE.split("export:")[0])
    result, ran = run_it(recipe, "convert.kv_heads=4")
    assert ran == ["report"]
    assert result.report.export is None, "nothing stays of an export that is no longer asked for"


def test_changed_text_and_changed_weights_are_seen(recipe: Path) -> None:
    run_it(recipe)
    text = recipe.with_name("text.jsonl")
    text.write_text(text.read_text() + '\n{"text": "one row more"}')
    with pytest.raises(TrainingError, match="rows: count, hash changed"):
        run_it(recipe)
    assert run_it(recipe, overwrite=True)[1][:2] == ["train", "evaluate"]
    weights = recipe.parent / "source" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(TrainingError, match=r"source: model\.safetensors changed"):
        run_it(recipe)
    assert run_it(recipe, overwrite=True)[1] == ALL


def test_an_interrupted_training_goes_on_to_the_same_bytes(recipe: Path, tmp_path: Path) -> None:
    class StopNowError(Exception):
        pass

    def stop_in_training(progress: Progress) -> None:
        if progress.task == "train" and progress.done == 2:
            raise StopNowError

    with pytest.raises(StopNowError):
        run(load_recipe(recipe), command="upcycle run", watch=stop_in_training)
    assert (tmp_path / "out" / "converted").is_dir()
    assert not (tmp_path / "out" / "uptrained").exists()

    result, ran = run_it(recipe)
    assert ran == ALL[1:]
    log = (result.layout.training / "log.jsonl").read_text()
    assert '"resumed": true' in log
    whole, _ = run_it(recipe, f"output={tmp_path / 'whole'}")
    assert hash_folder(result.layout.uptrained) == hash_folder(whole.layout.uptrained)


def test_training_and_export_may_be_left_out(short_recipe: Path) -> None:
    result, ran = run_it(short_recipe)
    assert ran == SHORT
    assert result.package is None
    assert result.report.export is None


def test_a_kill_after_the_export_leaves_no_stale_section(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def die(*_: object) -> None:
        raise KilledError

    run_it(recipe)
    with monkeypatch.context() as patch:
        patch.setattr("upcycle.pipeline.report_stage.write_report", die)
        with pytest.raises(KilledError):
            run_it(recipe, "export.context=64")
    result, ran = run_it(recipe, "export.context=64")
    assert ran == ["report"]
    assert result.report.export is not None
    assert result.report.export.context == 64


@pytest.mark.parametrize(
    ("damage", "content", "expected"),
    [
        ("stages.json", None, []),
        ("stages.json", b"[]", []),
        ("stages.json", b'{"convert": {"fing', []),
        ("stages.json", b'{"convert": "an older form"}', []),
        ("report/report.json", None, ["report"]),
        ("report/report.json", b"{", ["report"]),
        ("evaluation/comparison.json", None, ["evaluate"]),
        ("converted/upcycle.json", None, ["convert"]),
        ("converted/upcycle.json", b"{", ["convert"]),
        ("converted/model.safetensors", None, ["convert"]),
        ("converted/model.safetensors", b"short", ["convert"]),
        ("converted/model.safetensors", SAME_SIZE, ["convert"]),
    ],
)
def test_a_damaged_stage_is_run_again(
    short_recipe: Path, damage: str, content: bytes | None, expected: list[str]
) -> None:
    result, _ = run_it(short_recipe)
    made = hash_folder(result.layout.output)
    path = result.layout.output / damage
    size = path.stat().st_size
    path.unlink()
    if content == SAME_SIZE:
        path.write_bytes(b"\0" * size)
    elif content is not None:
        path.write_bytes(content)
    assert run_it(short_recipe)[1] == expected
    if not expected:  # what the stages made tells of itself
        del made[damage]
    assert made.items() <= hash_folder(result.layout.output).items()
    assert run_it(short_recipe)[1] == []


def test_a_strangers_folder_in_the_output_stays(short_recipe: Path) -> None:
    result, _ = run_it(short_recipe)
    (result.layout.report / "report.json").unlink()
    (result.layout.report / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not of this run: report\.json is not as"):
        run_it(short_recipe)
    (result.layout.report / "upcycle.json").unlink()
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="was not made by upcycle"):
            run_it(short_recipe, overwrite=overwrite)
    assert (result.layout.report / "mine.txt").read_text() == "mine"


def test_a_second_run_on_the_same_output_is_refused(
    short_recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = short_recipe.parent / "out"
    out.mkdir()
    monkeypatch.setattr("sys.argv", ["upcycle", "run", str(short_recipe)])
    with locked(out, out), pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"error: another process is writing {out}"
    assert [line.split(":")[0] for line in lines[1:]] == ["  where", "  fix"]
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "moved"),
    [
        ("source", None),
        ("source/out", None),
        (".", None),
        ("texts", "texts/text.jsonl"),
        ("texts/converted", "texts"),
    ],
)
def test_an_output_among_the_inputs_is_refused(
    short_recipe: Path, output: str, moved: str | None
) -> None:
    folder = short_recipe.parent
    overrides = [f"output={folder / output}"]
    if moved is not None:
        (folder / "texts").mkdir()
        (folder / "text.jsonl").rename(folder / "texts" / "text.jsonl")
        overrides.append(f"evaluate.text=[{folder / moved}]")
    before = tree(folder)
    with pytest.raises(OutputError, match="must lie outside each other"):
        run_it(short_recipe, *overrides)
    assert tree(folder) == before


def test_a_recipe_in_its_own_output_is_refused(short_recipe: Path) -> None:
    (short_recipe.parent / "out").mkdir()
    inside = short_recipe.rename(short_recipe.parent / "out" / "recipe.yaml")
    overrides = [
        f"{key}={short_recipe.parent / name}"
        for key, name in (("source", "source"), ("output", "out"))
    ] + [f"evaluate.text=[{short_recipe.parent / 'text.jsonl'}]"]
    with pytest.raises(OutputError, match="must lie outside each other"):
        run_command(Console(json=True, quiet=True), inside, overrides)
    assert tree(inside.parent) == ["recipe.yaml"]


@pytest.mark.parametrize("output", ["file", "file/out", "link"])
def test_an_output_that_cannot_be_made_is_refused(short_recipe: Path, output: str) -> None:
    folder = short_recipe.parent
    (folder / "file").write_text("a file")
    (folder / "link").symlink_to("nowhere")
    with pytest.raises(OutputError, match="cannot write"):
        run(
            load_recipe(short_recipe).model_copy(update={"output": folder / output}),
            command="upcycle run",
        )
    assert (folder / "file").read_text() == "a file"


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("convert.kv_heads=3", PlanError),
        ("convert.method=none", PlanError),
        ("evaluate.text=[none.txt]", DataError),
        ("evaluate.text=[empty.txt]", DataError),
        ("evaluate.text=[broken.jsonl]", DataError),
        ("evaluate.sequence_length=129", EvaluationError),
        ("evaluate.new_tokens=128", EvaluationError),
        ("train.sequence_length=129", EvaluationError),
        ("train.batch_size=4000", DataError),
        ("train.data.sources.0.path=empty.txt", DataError),
        ("export.untie=true", ExportError),
        ("export.context=160", EvaluationError),
        ("export.quantize=none", ExportError),
    ],
)
def test_a_refused_request_leaves_nothing(
    recipe: Path, override: str, error: type[UpcycleError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    Path("empty.txt").touch()
    Path("broken.jsonl").write_text("{broken")
    before = tree(recipe.parent)
    with pytest.raises(error):
        run_it(recipe, override)
    assert tree(recipe.parent) == before
    asked = load_recipe(recipe, [override]).model_dump_json(exclude_none=True)
    recipe.write_text(asked)
    assert not all(check.passed for check in preflight(recipe)), "doctor says the same"


def test_a_strangers_training_log_stays(recipe: Path) -> None:
    log = recipe.parent / "out" / "training" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("mine")
    with pytest.raises(OutputError, match="was not made by upcycle"):
        run_it(recipe)
    assert log.read_text() == "mine"
    assert not (recipe.parent / "out" / "converted").exists()


def test_a_failed_margin_is_no_success(recipe: Path) -> None:
    console = Console(json=True, quiet=True)
    assert run_command(console, recipe, ["evaluate.margins.kl_mean=100"]).passed
    assert not run_command(console, recipe, ["evaluate.margins.kl_mean=1e-9"]).passed
