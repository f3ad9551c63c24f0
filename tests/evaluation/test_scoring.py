"""Per-token scores against transformers' own loss and torch's own formulas."""

import pytest
import torch

from tests.tiny import tiny_model
from upcycle.data.windows import EvalRow
from upcycle.errors import EvaluationError
from upcycle.evaluation.scoring import batch_size_for, make_batches, score_pair, whole_batches

LENGTHS = [31, 7, 2, 19, 31, 12]


def rows(seed: int = 0) -> list[EvalRow]:
    generator = torch.Generator().manual_seed(seed)
    return [
        EvalRow(torch.randint(260, (length,), generator=generator), document)
        for document, length in enumerate(LENGTHS)
    ]


def test_nll_equals_the_loss_of_transformers() -> None:
    model, other = tiny_model(seed=0), tiny_model(seed=1)
    scores = score_pair(
        whole_batches(model), whole_batches(other), make_batches(rows(), 4), label="other"
    )
    for row in rows():
        chosen = scores.document == row.document
        for own, nll in ((model, scores.source_nll), (other, scores.model_nll)):
            with torch.inference_mode():
                loss = own(input_ids=row.ids[None], labels=row.ids[None]).loss
            assert nll[chosen].mean() == pytest.approx(loss.item(), abs=2e-6)


def test_kl_and_agreement_equal_torchs_formulas() -> None:
    model, other = tiny_model(seed=0), tiny_model(seed=1, num_key_value_heads=2)
    batches = make_batches(rows(), 3)
    scores = score_pair(whole_batches(model), whole_batches(other), batches, label="other")
    for row in rows():
        with torch.inference_mode():
            p, q = (m(input_ids=row.ids[None]).logits[0, :-1].double() for m in (model, other))
        kl = torch.nn.functional.kl_div(
            q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        chosen = scores.document == row.document
        assert scores.kl[chosen] == pytest.approx(kl.numpy(), abs=1e-5)
        assert (scores.agree[chosen] == (p.argmax(-1) == q.argmax(-1)).numpy()).all()


def test_every_token_but_the_first_is_scored_once_at_its_position() -> None:
    model = tiny_model()
    scores = score_pair(
        whole_batches(model), whole_batches(model), make_batches(rows(), 4), label="same"
    )
    for row in rows():
        positions = scores.position[scores.document == row.document]
        assert positions.tolist() == list(range(1, len(row.ids)))


def test_a_model_against_itself_differs_by_nothing() -> None:
    forward = whole_batches(tiny_model())
    scores = score_pair(forward, forward, make_batches(rows(), 4), label="same")
    assert scores.kl.max() == 0
    assert scores.agree.all()
    assert (scores.source_nll == scores.model_nll).all()


def test_long_rows_are_scored_in_chunks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = whole_batches(tiny_model(seed=0)), whole_batches(tiny_model(seed=1))
    batches = make_batches(rows(), 4)
    whole = score_pair(*forwards, batches, label="other")
    monkeypatch.setattr("upcycle.evaluation.scoring._CHUNK_ELEMENTS", 5 * 260)
    chunked = score_pair(*forwards, batches, label="other")
    assert chunked.kl == pytest.approx(whole.kl, abs=1e-6)
    assert (chunked.position == whole.position).all()


def test_logits_that_are_not_finite_are_refused() -> None:
    model, broken = tiny_model(), tiny_model()
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.inf
    with pytest.raises(EvaluationError, match="broken gives logits that are not finite"):
        score_pair(
            whole_batches(model), whole_batches(broken), make_batches(rows(), 4), label="broken"
        )


def test_another_vocabulary_is_refused() -> None:
    forwards = whole_batches(tiny_model()), whole_batches(tiny_model(vocab_size=300))
    with pytest.raises(EvaluationError, match="260 logits per token and other 300"):
        score_pair(*forwards, make_batches(rows(), 4), label="other")


def test_batches_hold_each_window_once_and_shrink_with_the_vocabulary() -> None:
    batches = make_batches(rows(), 4)
    assert sorted(d for batch in batches for d in batch.documents) == list(range(len(LENGTHS)))
    assert sum(batch.num_scored for batch in batches) == sum(LENGTHS) - len(LENGTHS)
    assert batch_size_for(2048, 512) == 16
    assert batch_size_for(128_000, 512) == 2
    assert batch_size_for(32_000, 512) == 4
