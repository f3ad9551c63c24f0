"""huggingface/transformers#12878, #8476, #15466: evaluation kept all logits until memory ran out.

At most one batch of logits per model may be alive, however many batches there are.
"""

import weakref

import torch

from upcycle.data.windows import EvalRow
from upcycle.evaluation.scoring import Batch, Forward, make_batches, score_pair

VOCABULARY, LENGTH, WINDOWS = 50_000, 20, 24


def test_logits_do_not_pile_up() -> None:
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def forward(batch: Batch) -> torch.Tensor:
        nonlocal alive, most
        logits = torch.zeros(*batch.ids.shape, VOCABULARY)
        weakref.finalize(logits, gone)
        alive += 1
        most = max(most, alive)
        return logits

    models: tuple[Forward, Forward] = (forward, forward)
    rows = [EvalRow(torch.arange(LENGTH), document) for document in range(WINDOWS)]
    scores = score_pair(*models, make_batches(rows, 2), label="model")
    assert len(scores.kl) == WINDOWS * (LENGTH - 1)
    assert most == 2
    assert alive == 0
