"""`upcycle eval`: exit codes, table, report folder."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.cli import eval as _eval  # noqa: F401 - registers the command
from upcycle.cli.app import app

TEXT = "".join(json.dumps({"text": f"row {i}\n" * 5}) + "\n" for i in range(6))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a converted and a second candidate, text, and a recipe with margins."""
    folder = tmp_path_factory.mktemp("place")
    tiny_checkpoint(folder / "source", seed=0)
    tiny_checkpoint(folder / "converted", seed=1, num_key_value_heads=2)
    (folder / "text.jsonl").write_text(TEXT)
    (folder / "recipe.yaml").write_text(
        f"""
source: {folder / "source"}
output: {folder / "run"}
convert: {{kv_heads: 2}}
evaluate:
  text: [text.jsonl]
  sequence_length: 32
  prompts: ["def "]
  new_tokens: 4
  margins: {{kl_mean: 1.0e-9}}
"""
    )
    return folder


def upcycle(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as stopped:
        app([str(word) for word in words])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_a_damaged_training_log_does_not_cost_the_evaluation(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = place / "run" / "training" / "log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(
        '{"step": 1, "loss": null, "tokens": 8}\nhello\n{"step": 2, "loss": 0.5, "tokens": 16}\n'
        '{"step": 3, "lo'
    )
    out = tmp_path / "report"
    options = ["--recipe", place / "recipe.yaml", "--device", "cpu"]
    code, _, _ = upcycle(
        capsys, "eval", place / "source", place / "converted", "--out", out, *options
    )
    log.unlink()
    assert code == 1  # the recipe's margin
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["training"] == {
        "steps": 2,
        "tokens": 16,
        "points": [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}],
        "held_out": [],
    }
    assert "training loss \N{EN DASH} → 0.5000" in (out / "report.md").read_text(encoding="utf-8")


def test_rows_that_were_not_used_are_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text(TEXT * 5 + '{"text": 5}\n{"text": ""}\n{"text": "a\\ud800"}\n')
    out = tmp_path / "report"
    options = ["--text", text, "--sequence-length", 32, "--device", "cpu"]
    code, printed, _ = upcycle(
        capsys, "eval", place / "source", place / "converted", "--out", out, *options
    )
    losses = (
        "31 documents, 1 dropped (empty), 1 bad ('text' is not text), the first at t.jsonl:31: "
        "'text' is not text: int, 1 with lone surrogates repaired"
    )
    assert code == 0
    assert f"not all of the text was used: {losses}" in printed
    assert json.loads((out / "report.json").read_text())["comparison"]["text"]["losses"] == losses
    assert f"Not all of the text was used: {losses}." in (out / "report.md").read_text()


def test_it_prints_a_table_and_writes_a_report(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    text = ["--text", place / "text.jsonl", "--sequence-length", 32, "--device", "cpu"]
    code, printed, _ = upcycle(
        capsys, "eval", place / "source", place / "converted", "--out", out, *text
    )
    assert code == 0
    assert "tokens of text.jsonl, 6 documents" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["source", "converted"]
    assert "No margins set" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    command = json.loads((out / "report.json").read_text())["command"]
    assert command.startswith("upcycle eval ")
    assert command.endswith("--sequence-length 32 --device cpu --dtype float32")


def test_it_says_when_it_read_the_packaged_text(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", 200, "--sequence-length", 32, "--out", tmp_path / "report"]
    code, printed, _ = upcycle(capsys, "eval", place / "source", place / "source", *options)
    assert code == 0
    assert "tokens of the packaged held-out text" in printed


def test_a_failed_margin_of_the_recipe_is_exit_code_1(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = place / "run" / "training" / "log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(json.dumps({"step": 1, "tokens": 64, "loss": 0.5}) + "\n")
    out = tmp_path / "report"
    words = ["eval", place / "source", place / "converted", "--out", out]
    code, printed, _ = upcycle(capsys, *words, "--recipe", place / "recipe.yaml", "--json")
    assert code == 1
    data = json.loads(printed)
    assert data["passed"] is False
    assert data["comparison"]["margins"][0]["name"] == "kl_mean"
    assert data["comparison"]["generations"][0]["prompt"] == "def "
    report = json.loads((out / "report.json").read_text())
    assert report["training"]["points"] == [{"step": 1, "loss": 0.5}]


def test_an_output_that_exists_is_refused_before_any_work(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    out.mkdir()
    code, printed, error = upcycle(
        capsys, "eval", place / "source", tmp_path / "no-such-model", "--out", out
    )
    assert code == 2
    assert printed == ""
    assert f"error: {out} exists" in error
    assert len(error.splitlines()) == 3


def test_a_missing_candidate_leaves_nothing_behind(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    code, _, error = upcycle(
        capsys, "eval", place / "source", tmp_path / "no-such-model", "--out", out
    )
    assert code == 2
    assert "no-such-model" in error
    assert list(tmp_path.iterdir()) == []
