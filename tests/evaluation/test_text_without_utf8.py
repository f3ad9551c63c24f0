"""File names, folder names, prompts and decoded text that UTF-8 cannot hold."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import upcycle.cli.convert
import upcycle.cli.doctor
import upcycle.cli.eval
import upcycle.cli.predict
import upcycle.cli.run
import upcycle.cli.sweep
import upcycle.cli.train  # noqa: F401 - registers the command
from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import REPORT_NAME, read_manifest
from upcycle.cli.app import app
from upcycle.errors import OutputError
from upcycle.report.render import HTML_NAME, MARKDOWN_NAME

NAME = os.fsdecode(b"n\xff")  # what PEP 383 makes of a byte that is no UTF-8
SHOWN = "n\\xff"
ROWS = "".join(json.dumps({"text": f"row {i} of the text\n" * 4}) + "\n" for i in range(40))
RECIPE = """
source: source
output: run
convert: {kv_heads: 2}
train:
  data: {sources: [{path: texts}]}
  sequence_length: 16
  batch_size: 4
  micro_batch_size: 4
  steps: 2
  learning_rate: 1.0e-3
  precision: fp32
  checkpoint_every: 1
evaluate: {text: [texts], sequence_length: 32, max_tokens: 300, prompts: [ro], new_tokens: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path, and what is in it, have names that are no UTF-8."""
    made = tmp_path_factory.mktemp("made")
    tiny_checkpoint(made / "source", seed=0)
    tiny_checkpoint(made / "candidate", seed=1, num_key_value_heads=2)
    folder = made / NAME
    (folder / "texts").mkdir(parents=True)
    shutil.move(made / "source", folder / "source")
    shutil.move(made / "candidate", folder / NAME)
    (folder / f"{NAME}.jsonl").write_text(ROWS)
    (folder / "texts" / f"{NAME}.jsonl").write_text(ROWS)
    (folder / f"{NAME}.yaml").write_text(RECIPE)
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def report_of(folder: Path) -> tuple[dict[str, Any], str]:
    """report.json and the Markdown; the HTML is UTF-8 too."""
    (folder / HTML_NAME).read_text(encoding="utf-8")
    markdown = (folder / MARKDOWN_NAME).read_text(encoding="utf-8")
    return json.loads((folder / REPORT_NAME).read_bytes()), markdown


def test_eval(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ["--text", place / f"{NAME}.jsonl", "--sequence-length", 32, "--max-tokens", 200]
    done = call("eval", place / "source", place / NAME, "--out", out, "--prompt", NAME, *options)
    assert done.exit_code == 0, done.output
    assert f"tokens of {SHOWN}.jsonl" in done.stdout
    report, markdown = report_of(out)
    comparison = report["comparison"]
    assert comparison["text"]["files"] == [f"{SHOWN}.jsonl"]
    assert [model["label"] for model in comparison["models"]] == ["source", SHOWN]
    assert comparison["generations"][0]["prompt"] == "n\N{REPLACEMENT CHARACTER}"
    assert f"{SHOWN}.jsonl" in report["command"]
    assert f"| held-out text | `{SHOWN}.jsonl` |" in markdown


def test_a_tokenizer_that_decodes_to_surrogates(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PreTrainedTokenizerFast.decode
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "decode", lambda *args, **kw: usual(*args, **kw) + "\ud800"
    )
    options = ["--sequence-length", 32, "--max-tokens", 100, "--prompt", "ro"]
    done = call("eval", place / "source", place / NAME, "--out", tmp_path / "report", *options)
    assert done.exit_code == 0, done.output
    report, markdown = report_of(tmp_path / "report")
    assert report["comparison"]["generations"][0]["continuations"][0]["agreed"].endswith("\ufffd")
    assert "\ufffd" in markdown


def test_control_characters_are_pictures_on_pages(tmp_path: Path) -> None:
    from tests.report.example import document, typed
    from upcycle.report.render import write_report

    report_before = document()
    report_before["comparison"]["generations"][0]["prompt"] = "a\0b\x1b[31m\x7f\u2028c"
    write_report(typed(report_before), tmp_path)
    report, markdown = report_of(tmp_path)
    assert report["comparison"]["generations"][0]["prompt"] == "a\0b\x1b[31m\x7f\u2028c"
    assert "a␀b␛[31m␡\u2028c" in markdown
    assert b"\0" not in (tmp_path / HTML_NAME).read_bytes()


def test_conversions_and_predictions(place: Path, tmp_path: Path) -> None:
    text = ["--calibration", place / f"{NAME}.jsonl", "--calibration-tokens", 512]
    out = place / "converted"
    done = call("convert", place / "source", out, "--kv-heads", 2, *text, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.options.document["calibration"] == [f"{SHOWN}.jsonl"]
    done = call("predict", place / "source", *text)
    assert done.exit_code == 0, done.output
    assert f"{SHOWN}.jsonl" in done.stdout
    page = tmp_path / f"{NAME}.html"
    short = ["--max-tokens", 64, "--sequence-length", 32, "--kv-heads", 2, "--html", page]
    done = call("sweep", place / "source", "--text", place / f"{NAME}.jsonl", *short)
    assert done.exit_code == 0, done.output
    assert f"{SHOWN}.jsonl" in page.read_text(encoding="utf-8")


def test_runs_and_resumption(place: Path) -> None:
    recipe = place / f"{NAME}.yaml"
    checked = call("doctor", recipe)
    assert checked.exit_code == 0, checked.output
    done = call("run", recipe)
    assert done.exit_code == 0, done.output
    report, _ = report_of(place / "run" / "report")
    assert report["comparison"]["text"]["files"] == [f"texts/{SHOWN}.jsonl"]
    assert call("run", recipe).stdout.count("finished before") == 4
    shutil.rmtree(place / "run" / "uptrained")
    resumed = call("train", recipe, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert "went on after step 2" in json.loads(resumed.stdout)["notes"]


def test_errors_say_the_name(place: Path, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.jsonl").write_text('{"text": 5}\n' * 3)
    done = call(
        "eval", place / "source", place / NAME, "--out", tmp_path / "o", "--text",
        tmp_path / f"{NAME}.jsonl",
    )  # fmt: skip
    assert done.exit_code == 2
    assert f"rows of {SHOWN}.jsonl cannot be read" in done.stderr
    assert not (tmp_path / "o").exists()


def test_names_too_long_are_refused_before_any_work(place: Path, tmp_path: Path) -> None:
    from upcycle.checkpoint.staging import check_output

    check_output(tmp_path / ("x" * 245))
    with pytest.raises(OutputError, match="the name of the output has 250 bytes"):
        check_output(tmp_path / ("é" * 125))
