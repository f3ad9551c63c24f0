"""EleutherAI/lm-evaluation-harness#3333, #2382, #2676: BOS twice, or not at all.

A tokenizer that adds BOS by itself must give each document exactly one; a wrong count moved
accuracies from 0.85 to 0.26.
"""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tests.tiny import byte_tokenizer
from upcycle.data.documents import tokenise_files
from upcycle.data.windows import eval_rows
from upcycle.evaluation.held_out import read_held_out
from upcycle.options.evaluate import EvaluateOptions

BOS = 0


@pytest.mark.parametrize("tokenizer_adds_bos", [True, False])
def test_each_document_starts_with_bos_exactly_once(
    tmp_path: Path, tokenizer_adds_bos: bool
) -> None:
    tokenizer = byte_tokenizer()
    if tokenizer_adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
        )
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("hello")
    for row in eval_rows(tokenise_files(files, tokenizer), 64, 1000):
        assert row.ids[0] == BOS
        assert (row.ids[1:6] != BOS).all()
    held_out = read_held_out(
        EvaluateOptions(text=files, sequence_length=64, max_tokens=1000), tokenizer
    )
    assert held_out.text.bos
    assert held_out.text.bytes == 2 * len("hello")  # special tokens are no text
