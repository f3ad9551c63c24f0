"""The look at the training text before a run says what it has not seen."""

import json
from pathlib import Path

import pytest

from tests.training.runs import tiny_run
from upcycle.errors import DataError
from upcycle.training.rows import check_text, training_rows


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_rows_that_were_not_looked_at_are_said(tmp_path: Path, share: float) -> None:
    run = tiny_run(tmp_path)
    good = json.dumps({"text": "a line of text " * 40}) + "\n"
    recipe = run.recipe(data={"sources": [{"path": run.text}], "max_bad_share": share})
    run.text.write_text(good * 200 + "{no json\n")
    told = check_text(run.student, recipe)
    assert "text.jsonl: only the first 20 documents were looked at, " in told
    assert "bad rows behind them count in the run" in told
    if not share:
        with pytest.raises(DataError, match="1 of 201 rows"):
            training_rows(run.student, recipe)
    # A bad row that is seen is enough where none may be.
    run.text.write_text(good * 5 + "{no json\n" + good * 200)
    if share:
        assert "1 bad (" in check_text(run.student, recipe)
    else:
        with pytest.raises(DataError, match=r"rows of text\.jsonl cannot be read") as caught:
            check_text(run.student, recipe)
        assert "up to 0 % of a file's rows may be bad (train.data.max_bad" in caught.value.fix


def test_a_source_that_is_read_to_its_end_is_not_called_a_part(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run.text.write_text(json.dumps({"text": "a line of text " * 40}) + "\n")
    assert "looked at" not in check_text(run.student, run.recipe(batch_size=4))
