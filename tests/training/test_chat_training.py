"""Training on chats: rendered by the checkpoint's own template, loss on the assistant alone."""

import json
from pathlib import Path

import pytest

from tests.training.runs import TinyRun, tiny_run
from upcycle.data.packing import IGNORED
from upcycle.errors import DataError, UpcycleWarning
from upcycle.models.loading import load_tokenizer
from upcycle.training.log import read_log
from upcycle.training.rows import check_text, training_rows

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
    assert len([row for row in read_log(result.log) if row.loss is not None]) == 4
    assert (result.output / "chat_template.jinja").read_text() == TEMPLATE


def test_a_few_chats_that_the_template_refuses_do_not_stop_a_run(run: TinyRun) -> None:
    refusing = "{% if messages|length != 2 %}{{ raise_exception('two turns') }}{% endif %}"
    for folder in (run.student, run.teacher):
        (folder / "chat_template.jinja").write_text(refusing + TEMPLATE)
    bad = '{"messages": [{"role": "user", "content": "x"}]}\n'
    broken = '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", '
    run.text.write_text(bad + broken + '"content": "X"}], "tools": [{}]}\n' + run.text.read_text())
    recipe = data(run, assistant_only=True)
    assert "1 bad" in check_text(run.student, run.recipe(data=recipe))
    with pytest.warns(UpcycleWarning) as told:
        run.train(data=recipe, steps=2)
    (message,) = [str(each.message) for each in told if each.category is UpcycleWarning]
    assert message == (
        "not all of the text was used: text.jsonl: 61 documents, 1 bad (the chat template cannot "
        "render this chat), the first at text.jsonl:1: the chat template cannot render this chat: "
        "two turns, 1 with unused 'tools', which the chat template does not read, 1 with lone "
        "surrogates repaired"
    )
    with pytest.raises(DataError, match="1 of 62 rows"):
        run.train("strict", data={**recipe, "max_bad_share": 0})


def test_a_template_without_marks_is_refused(run: TinyRun) -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (run.student / "chat_template.jinja").write_text(plain)
    with pytest.raises(DataError, match="marks the assistant's turns"):
        run.train(data=data(run, assistant_only=True))
