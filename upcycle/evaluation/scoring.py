"""Run two models over the same batches and keep a few numbers per token.

Logits live for one batch only, so memory does not grow with the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upcycle.data.windows import EvalRow
from upcycle.errors import EvaluationError

# Logits of one batch in float32. Two models and a chunk of temporaries take about thrice that.
LOGITS_BYTES = 256 << 20
LARGEST_BATCH = 16


@dataclass(frozen=True)
class Batch:
    """Windows of like length, padded to the right.

    Attributes:
        ids: [B, T] int64. Padding is any token: under a causal mask nothing to its left sees it.
        lengths: real tokens of each row.
        windows: index of each row's window in the text.
        documents: index of each row's document.
    """

    ids: torch.Tensor
    lengths: list[int]
    windows: list[int]
    documents: list[int]

    @property
    def num_scored(self) -> int:
        """Tokens scored: all but the first of each row."""
        return sum(self.lengths) - len(self.lengths)


def batch_size_for(vocabulary: int, sequence_length: int) -> int:
    """Windows per batch whose logits stay within `LOGITS_BYTES`, from 2 to `LARGEST_BATCH`."""
    fitting = LOGITS_BYTES // (4 * vocabulary * sequence_length)
    return max(2, min(LARGEST_BATCH, fitting))


def make_batches(rows: Sequence[EvalRow], size: int) -> list[Batch]:
    """Batches of `size` windows, the longest first, so that little is padded."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    return [_padded(rows, order[start : start + size]) for start in range(0, len(order), size)]


def _padded(rows: Sequence[EvalRow], chosen: Sequence[int]) -> Batch:
    windows = [rows[index] for index in chosen]
    return Batch(
        ids=torch.nn.utils.rnn.pad_sequence([row.ids for row in windows], batch_first=True),
        lengths=[len(row.ids) for row in windows],
        windows=list(chosen),
        documents=[row.document for row in windows],
    )


Forward = Callable[[Batch], torch.Tensor]
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Scores:
    """Per-token results of a pair of models; every array is [N].

    Attributes:
        document: index of the token's document.
        window: index of its window.
        position: tokens before it in its window.
        source_nll: negative log-likelihood under the source, nats.
        model_nll: the same under the model.
        kl: KL(source || model) of the distribution over this token, nats.
        agree: whether both rank the same token first.
    """

    document: NDArray[np.int64]
    window: NDArray[np.int64]
    position: NDArray[np.int64]
    source_nll: NDArray[np.float32]
    model_nll: NDArray[np.float32]
    kl: NDArray[np.float32]
    agree: NDArray[np.bool_]


def whole_batches(model: Any) -> Forward:
    """[B, T, V] logits of a batch in one pass."""

    def forward(batch: Batch) -> torch.Tensor:
        # No mask: padding lies to the right, and a mask would only choose a slower kernel.
        logits: torch.Tensor = model(input_ids=batch.ids.to(model.device), use_cache=False).logits
        return logits

    return forward


def one_by_one(model: Any) -> Forward:
    """[B, T, V] logits of a batch, each row in a pass of its own without padding."""

    def forward(batch: Batch) -> torch.Tensor:
        rows = [
            model(input_ids=ids[None, :length].to(model.device), use_cache=False).logits[0]
            for ids, length in zip(batch.ids, batch.lengths, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    return forward


@torch.inference_mode()
def score_pair(
    source: Forward,
    model: Forward,
    batches: Sequence[Batch],
    *,
    label: str,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Scores:
    """Score every token of the batches under both models.

    Args:
        source: logits of the source.
        model: logits of the model that is compared with it.
        batches: the text.
        label: the model's name, for errors.
        on_tokens: told how many tokens were scored after each batch.

    Raises:
        EvaluationError: the vocabularies differ in size, or logits are not finite.
    """
    columns: list[list[NDArray[Any]]] = [[] for _ in fields(Scores)]
    for batch in batches:
        # A function of its own, so that the logits are gone before the next batch.
        for row in _score_batch(source, model, batch, label):
            for column, values in zip(columns, row, strict=True):
                column.append(values.cpu().numpy())
        on_tokens(batch.num_scored)
    scores = Scores(*(np.concatenate(column) for column in columns))
    for name, nll in (("the source", scores.source_nll), (label, scores.model_nll)):
        if not np.isfinite(nll).all():
            raise EvaluationError(
                f"{name} gives logits that are not finite",
                where=f"{(~np.isfinite(nll)).sum()} of {len(nll)} tokens",
                fix="use --dtype float32; if it stays, the checkpoint is damaged",
            )
    return scores


def _score_batch(
    source: Forward, model: Forward, batch: Batch, label: str
) -> list[tuple[torch.Tensor, ...]]:
    """The columns of `Scores` for each row of a batch, in chunks of tokens."""
    source_logits, model_logits = source(batch), model(batch)
    vocabulary = source_logits.shape[-1]
    if vocabulary != model_logits.shape[-1]:
        raise EvaluationError(
            f"the source gives {vocabulary} logits per token and {label} {model_logits.shape[-1]}",
            where=f"vocab_size of {label}",
            fix="compare models of one vocabulary",
        )
    ids = batch.ids.to(source_logits.device)
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    chunks: list[tuple[torch.Tensor, ...]] = []
    for row, length in enumerate(batch.lengths):
        for start in range(0, length - 1, size):
            end = min(start + size, length - 1)
            positions = torch.arange(start + 1, end + 1)
            scored = _score_tokens(
                source_logits[row, start:end],
                model_logits[row, start:end],
                ids[row, start + 1 : end + 1],
            )
            document, window = (
                torch.full_like(positions, values[row])
                for values in (batch.documents, batch.windows)
            )
            chunks.append((document, window, positions, *scored))
    return chunks


def _score_tokens(
    source: torch.Tensor, model: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """NLL under both, KL(source || model) and agreement; logits [N, V] to four [N]."""
    source, model = source.float().log_softmax(-1), model.float().log_softmax(-1)
    target = targets[:, None]
    kl = (source.exp() * (source - model)).sum(-1).clamp_min(0)  # rounding may go below
    agree = source.argmax(-1) == model.argmax(-1)
    return -source.gather(1, target)[:, 0], -model.gather(1, target)[:, 0], kl, agree
