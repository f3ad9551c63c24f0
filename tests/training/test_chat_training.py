"""Training on chats: rendered by the checkpoint's own template, loss on the assistant alone."""

import json
from pathlib import Path

import pytest

from tests.training.runs import TinyRun, tiny_run
from upcycle.checkpoint.loading import load_tokenizer
from upcycle.data.packing import IGNORED
from upcycle.errors import DataError
from upcycle.training.facts import training_rows
from upcycle.training.log import read_log

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}.{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    found = tiny_run(tmp_path)
    for folder in (found.student, found.teacher):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"ask {number}"},
                {"role": "assistant", "content": "XYZ"[: 1 + number % 3]},
            ]
        }
        for number in range(60)
    ]
    found.text.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return found


def data(run: TinyRun, *, assistant_only: bool) -> dict[str, object]:
    return {"sources": [{"path": run.text}], "chat": {"assistant_only": assistant_only}}


def test_only_the_assistant_carries_a_loss(run: TinyRun) -> None:
    recipe = run.recipe(data=data(run, assistant_only=True), sequence_length=64)
    tokenizer = load_tokenizer(run.student)
    rows, held_out = training_rows(run.student, recipe)
    scored = [t for part in (rows, held_out) for t in part.labels.flatten().tolist()]
    text = tokenizer.decode([token for token in scored if token != IGNORED])
    assert set(text) == set("XYZ.")
    assert text.count(".") == 60


def test_a_run(run: TinyRun) -> None:
    result = run.train(data=data(run, assistant_only=True), cross_entropy=1.0, steps=4)
    assert len([row for row in read_log(result.log) if "loss" in row]) == 4
    assert (result.output / "chat_template.jinja").read_text() == TEMPLATE


def test_a_template_without_marks_is_refused(run: TinyRun) -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (run.student / "chat_template.jinja").write_text(plain)
    with pytest.raises(DataError, match="marks the assistant's turns"):
        run.train(data=data(run, assistant_only=True))
