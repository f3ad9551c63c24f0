"""A short text gives no or odd blocks (huggingface/transformers#18167, #23424).

A corpus shorter than one sequence, or than one batch, is refused with its counts; a last short
block is padded and trained on.
"""

from pathlib import Path

import pytest

from tests.training.runs import tiny_run
from upcycle.data.ledger import Document
from upcycle.data.packing import IGNORED, pack
from upcycle.data.tokens import tokenise_documents
from upcycle.errors import DataError
from upcycle.models.loading import load_tokenizer


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (5, "1 documents with 7 tokens are less than one row of 16"),
        (60, "4 rows of 16 tokens, of which 1 held out, are less than one batch of 8"),
    ],
)
def test_too_little_text(tmp_path: Path, length: int, message: str) -> None:
    run = tiny_run(tmp_path)
    run.text.write_text(f'{{"text": "{"x" * length}"}}\n')
    with pytest.raises(DataError) as caught:
        run.train()
    assert message in caught.value.what
    assert not (tmp_path / "out").exists()


def test_the_last_short_block_is_kept(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_run(tmp_path).student)
    rows = pack(tokenise_documents([Document("d", text="x" * 18)], tokenizer), 16)
    assert len(rows) == 2
    assert rows.labels[1].ne(IGNORED).sum() == 3
