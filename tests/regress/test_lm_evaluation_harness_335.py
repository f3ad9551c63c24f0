"""EleutherAI/lm-evaluation-harness#335, #879, #3055, #1625: scores changed with the batch size.

In float32 they do not; in bfloat16 they do, and the report's noise floor says by how much.
"""

import numpy as np
import torch

from tests.tiny import tiny_model
from upcycle.data.windows import EvalRow
from upcycle.evaluation.scoring import make_batches, one_by_one, score_pair, whole_batches


def rows() -> list[EvalRow]:
    generator = torch.Generator().manual_seed(0)
    lengths = [64, 33, 5, 48, 64, 17, 2, 29]
    return [
        EvalRow(torch.randint(260, (length,), generator=generator), document)
        for document, length in enumerate(lengths)
    ]


def differences(dtype: torch.dtype) -> np.ndarray:
    model = tiny_model().to(dtype)
    batches = make_batches(rows(), 8)
    scores = score_pair(whole_batches(model), one_by_one(model), batches, label="source")
    return np.abs(scores.source_nll - scores.model_nll)


def test_batches_of_eight_and_of_one_agree_in_float32() -> None:
    assert differences(torch.float32).max() < 1e-5


def test_bfloat16_is_noisier_and_the_measure_shows_it() -> None:
    assert differences(torch.bfloat16).max() > differences(torch.float32).max()
