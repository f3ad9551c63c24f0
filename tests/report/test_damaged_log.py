"""Training logs that a run did not finish, or with lines and values that nobody can draw."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.report.example import document, example, typed
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import REPORT_NAME
from upcycle.pages.formatting import MISSING
from upcycle.report.build import build_report, read_training_log
from upcycle.report.render import HTML_NAME, MARKDOWN_NAME, write_report
from upcycle.report.schema import HeldOutPoint, Training, TrainingPoint
from upcycle.training.log import RunLog, read_log

START = b'{"step": 0, "heldout_nll": 3.5, "heldout_kl": 0.4}\n'
ONE = b'{"step": 1, "tokens": 100, "loss": 0.9}\n'
TWO = b'{"step": 2, "tokens": 200, "loss": 0.5}\n'


def rendered(folder: Path, log: bytes) -> tuple[Training | None, str, str]:
    """What the log says, and the report's Markdown and HTML; report.json is strict JSON."""
    path = folder / "log.jsonl"
    path.write_bytes(log)
    training = read_training_log(path)
    write_report(replace(example(), training=training), folder / "report")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (folder / "report" / REPORT_NAME).read_text(encoding="utf-8")
    stored = json.loads(text, parse_constant=refuse)
    assert stored["training"] == (None if training is None else asdict(training))
    pages = [(folder / "report" / name).read_text("utf-8") for name in (MARKDOWN_NAME, HTML_NAME)]
    return training, pages[0], pages[1]


@pytest.mark.parametrize(
    "between",
    [
        b"",
        b"hello\n",
        b"[1, 2]\n",
        b'{"no": "step"}\n',
        b'{"step": true, "loss": 7.0}\n',
        b'{"step": "3", "loss": 7.0}\n',
        b'{"step": -1, "loss": 7.0}\n',
        b'{"step": 1' + b"0" * 400 + b', "loss": 7.0}\n',
        b'{"step": 1, "unknown": {"loss": 4}}\n',
        b"\xff\xfe\x00\n",
        b"\x00" * 64 + b"\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=[
        "none", "text", "list", "no step", "bool", "word", "negative", "huge", "unknown", "bytes",
        "zeros", "deep",
    ],
)  # fmt: skip
@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "tok', b'{"step": 3, "loss": 1e\n'])
def test_foreign_and_torn_lines_are_passed_over(
    tmp_path: Path, between: bytes, torn: bytes
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(START + ONE + between + TWO + torn)
    assert read_training_log(path) == Training(
        steps=2,
        tokens=200,
        points=[TrainingPoint(1, 0.9), TrainingPoint(2, 0.5)],
        held_out=[HeldOutPoint(0, kl=0.4, nll=3.5)],
    )


@pytest.mark.parametrize(
    "value", [b"null", b"NaN", b"-Infinity", b'"x"', b"true", b"9" * 400, b"-1e308"]
)
def test_what_is_no_number_is_a_dash_and_a_gap(tmp_path: Path, value: bytes) -> None:
    log = START.replace(b"0.4", value).replace(b"3.5", value) + ONE
    log += TWO.replace(b"0.5", value) + b'{"step": 3, "tokens": 300, "loss": 0.25}\n'
    training, markdown, html = rendered(tmp_path, log)
    assert training is not None
    assert [point.loss for point in training.points] == [0.9, None, 0.25]
    assert training.held_out == [HeldOutPoint(0, kl=None, nll=None)]
    assert "3 steps, 300 tokens; training loss 0.9000 → 0.2500" in markdown
    assert f"| 0 | {MISSING} | {MISSING} |" in markdown
    assert ">training loss<" in html
    assert "nan" not in html.lower().split("</style>")[1]


@pytest.mark.parametrize("value", ["null", "NaN"])
def test_nothing_but_nulls(tmp_path: Path, value: str) -> None:
    log = f'{{"step": 1, "loss": {value}, "tokens": {value}}}\n'.encode()
    training, markdown, _ = rendered(tmp_path, log)
    assert training is not None
    assert training.points == [TrainingPoint(1, None)]
    assert f"1 steps, {MISSING} tokens; training loss {MISSING} → {MISSING} nats" in markdown


@pytest.mark.parametrize("log", [b"", b"\n\n", START, b'{"step": 3'])
def test_a_log_without_steps_is_no_training(tmp_path: Path, log: bytes) -> None:
    training, markdown, _ = rendered(tmp_path, log)
    assert training is None
    assert "## Uptraining" not in markdown


def test_numbers_as_large_as_fp32_are_drawn(tmp_path: Path) -> None:
    log = ONE.replace(b"0.9", b"1.7e38") + TWO.replace(b"0.5", b"-1.7e38")
    training, _, html = rendered(tmp_path, log)
    assert training is not None
    assert [point.loss for point in training.points] == [1.7e38, -1.7e38]
    assert ">training loss<" in html


def test_joined_logs_are_one_curve(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(TWO + ONE + START + ONE.replace(b"0.9", b"0.8") + START.replace(b"0.4", b"2"))
    assert read_training_log(path) == Training(
        steps=2,
        tokens=200,
        points=[TrainingPoint(1, 0.8), TrainingPoint(2, 0.5)],
        held_out=[HeldOutPoint(0, kl=2.0, nll=3.5)],
    )


def test_resuming_keeps_what_lies_behind_a_foreign_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(START + ONE + b"hello\n" + TWO + b'{"step": 3, "lo')
    RunLog(path, after=2)
    assert [record.step for record in read_log(path)] == [0, 1, 2]


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    """A report of a model whose numbers are not finite is still a report."""
    report = document()
    change = report["comparison"]["models"][-1]["divergence"]
    change["nll_difference"] = float("nan")
    change["kl"]["max"] = float("inf")
    write_report(typed(report), tmp_path)
    stored = json.loads((tmp_path / REPORT_NAME).read_text())
    assert stored["comparison"]["models"][-1]["divergence"]["kl"]["max"] is None
    assert f"NLL increase: **{MISSING}**" in (tmp_path / MARKDOWN_NAME).read_text()


def test_a_report_that_cannot_be_rendered_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(document: object) -> str:
        raise ValueError("no page")

    monkeypatch.setattr("upcycle.report.render.render_html", fail)
    with pytest.raises(ValueError, match="no page"):
        write_report(example(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("log", [b"", b"hello\n\xff\n", START])
def test_a_report_says_that_nothing_of_a_log_can_be_read(tmp_path: Path, log: bytes) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    path = tmp_path / "log.jsonl"
    path.write_bytes(log)
    whole = example().comparison
    comparison = replace(whole, models=whole.models[:2])
    labels = [model.label for model in comparison.models]
    folders = dict(zip(labels, (source, tmp_path / "out"), strict=True))
    for given, told in ((path, 1), (None, 0)):
        report = build_report(comparison, folders=folders, command="x", training_log=given)
        said = [line for line in report.warnings if line.startswith("log.jsonl of the upt")]
        assert report.training is None
        assert len(said) == told
    report = build_report(comparison, folders=folders, command="x", training_log=path)
    write_report(report, tmp_path / "report")
    for name in (MARKDOWN_NAME, HTML_NAME):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert "log.jsonl of the uptraining tells of no step that can be read" in text
