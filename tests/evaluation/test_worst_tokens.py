"""The worst tokens are the planted ones, with their own text before them."""

import numpy as np
import torch

from tests.tiny import byte_tokenizer
from upcycle.data.windows import EvalRow
from upcycle.evaluation.scoring import Batch, make_batches, score_pair
from upcycle.evaluation.statistics import worst_tokens

TOKENIZER = byte_tokenizer()
TEXTS = ["short", "def main(argv):\n    return 0\n", "naïve café"]


def rows() -> list[EvalRow]:
    return [
        EvalRow(TOKENIZER(text, return_tensors="pt")["input_ids"][0], document)
        for document, text in enumerate(TEXTS)
    ]


def uniform(batch: Batch) -> torch.Tensor:
    return torch.zeros(*batch.ids.shape, 257)


def planted(batch: Batch) -> torch.Tensor:
    """As uniform, but sure that no `r` follows: 5 nats worse at every `r`."""
    logits = uniform(batch)
    logits[..., TOKENIZER.convert_tokens_to_ids("r")] = -5
    return logits


def test_the_planted_tokens_are_found_with_what_stands_before_them() -> None:
    scores = score_pair(uniform, planted, make_batches(rows(), 2), label="planted")
    found = worst_tokens(scores, rows(), TOKENIZER, count=4)
    assert {worst.token for worst in found} == {"r"}
    assert {worst.before for worst in found} == {
        "sho",
        "def main(a",
        "def main(argv):\n    ",
        "def main(argv):\n    retu",
    }
    for worst in found:
        assert worst.source_nll == np.float32(np.log(257))
        assert worst.model_nll - worst.source_nll > 4.9


def test_tokens_that_got_better_are_not_among_them() -> None:
    scores = score_pair(planted, planted, make_batches(rows(), 2), label="same")
    assert worst_tokens(scores, rows(), TOKENIZER) == []
