"""EleutherAI/lm-evaluation-harness#1833, #2301; huggingface/evaluate#560: perplexities of the same
model that do not match, because unit and window rule were not written beside them.
"""

from tests.report.example import example
from upcycle.report.render import render_html, render_markdown


def test_the_report_names_every_unit_and_the_window_rule() -> None:
    for text in (render_html(example()), render_markdown(example())):
        flat = " ".join(text.split())
        assert "per token" in flat
        assert "per word" in flat
        assert "Bits per byte" in flat
        assert "in 97 windows of at most 512 tokens" in flat
        assert "each on its own and after one BOS token" in flat
        assert "39,903 tokens are scored (128,764 bytes, 12,871 words)" in flat
