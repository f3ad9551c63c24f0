"""EleutherAI/lm-evaluation-harness#1586: EOS put where a model expects BOS, or nothing.

A tokenizer without BOS gets none, the first token is context only, and the report says so: word
perplexities of 39 and 1.8e7 were both called right.
"""

from pathlib import Path

from tests.tiny import byte_tokenizer
from upcycle.evaluation.held_out import read_held_out
from upcycle.options.evaluate import EvaluateOptions
from upcycle.report.summary import window_rule


def test_a_tokenizer_without_bos_is_given_none(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    file = tmp_path / "a.txt"
    file.write_text("hello")
    held_out = read_held_out(
        EvaluateOptions(text=[file], sequence_length=64, max_tokens=1000), tokenizer
    )
    ids = held_out.rows[0].ids
    assert ids.tolist() == [*tokenizer("hello")["input_ids"], tokenizer.eos_token_id]
    assert held_out.text.tokens == 5  # four letters and the end of text
    assert held_out.text.bytes == 4
    assert "each on its own and with no BOS token" in window_rule(held_out.text)
