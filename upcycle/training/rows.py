"""The rows that a run trains on and holds out, and the text that they are made of."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from upcycle.data.documents import tokenise_files
from upcycle.data.ledger import TRAIN_DATA, Ledger
from upcycle.data.tokens import Tokens
from upcycle.errors import DataError
from upcycle.models.loading import load_tokenizer
from upcycle.options.train import DataOptions, TrainOptions
from upcycle.utf8 import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from upcycle.data.packing import PackedRows

_HELD_OUT_SHARE, _MOST_HELD_OUT_ROWS = 50, 16
# Where few tokens are targets, and few of those are trained on, all rows are looked at.
_PLAIN_SHARE, _FEW_TARGETS = 0.5, 1000
_DOCUMENTS = 20  # of every source, read at least before a run


def training_rows(tokenizer_folder: Path, recipe: TrainOptions) -> "tuple[PackedRows, PackedRows]":
    """Packed rows to train on, and the last few (about 2 %), which are held out from it.

    Raises:
        DataError: the text cannot be read, is less than one batch, or has nothing to learn from in
            the rows of any step.
    """
    from upcycle.data.packing import IGNORED, pack

    tokens = _tokens(recipe.texts, load_tokenizer(tokenizer_folder), recipe.data)
    rows = pack(tokens, recipe.sequence_length, where=_where(recipe))
    # The last rows may carry no loss, such as one of a single token: there is nothing to measure.
    last_with_targets = int((rows.labels != IGNORED).any(dim=1).nonzero().max())
    num_held_out = max(_held_out(len(rows)), len(rows) - last_with_targets)
    _check_batch(len(rows), num_held_out, recipe)
    num_training = len(rows) - num_held_out
    training = rows.part(0, num_training)
    _check_steps(training, recipe)
    return training, rows.part(num_training, len(rows))


def _check_steps(rows: "PackedRows", recipe: TrainOptions) -> None:
    """Refuse a run of which every step would be passed over.

    Raises:
        DataError: naming the sources and their share of targets.
    """
    from upcycle.data.packing import IGNORED, batch_rows

    if not rows.num_targets:
        raise _no_targets(f"{len(rows)} rows of {recipe.sequence_length} tokens", recipe)
    has_targets = (rows.labels[:, 1:] != IGNORED).any(dim=1)
    for step in range(recipe.num_steps):
        chosen = batch_rows(
            step, batch_size=recipe.batch_size, num_rows=len(rows), seed=recipe.seed
        )
        if bool(has_targets[chosen].any()):
            return
    share = target_share(rows.num_targets, rows.input_ids.numel())
    what = f"the rows that {recipe.num_steps} steps train on"
    raise _no_targets(what, recipe, f": only {share}", ", train more steps")


def _no_targets(what: str, recipe: TrainOptions, share: str = "", also: str = "") -> DataError:
    """The refusal of text that nothing could be learnt from."""
    return DataError(
        f"none of {what} carries a loss{share}",
        where=_where(recipe),
        fix=f"give chats in which the assistant says something{also}, or turn assistant_only off",
    )


def _where(recipe: TrainOptions) -> str:
    names = ", ".join(shown(path.name) for path in recipe.texts)
    return f"recipe, train.data.sources: {names}"


def target_share(targets: int, tokens: int) -> str:
    """How many tokens carry a loss, for people."""
    return f"{targets:,} of {tokens:,} tokens ({targets / tokens:.1%}) are targets"


def check_text(tokenizer_folder: Path, recipe: TrainOptions) -> str:
    """Refuse text that no run could train on, reading little more of it than that takes.

    Returns:
        What was found, for people, and of which source the rest was not looked at.

    Raises:
        DataError: a source cannot be read, rendered and tokenised, or all are less than one batch.
    """
    tokenizer, data = load_tokenizer(tokenizer_folder), recipe.data
    enough = (recipe.batch_size + _MOST_HELD_OUT_ROWS) * recipe.sequence_length
    details, filled, targets = [], 0, 0
    for path in recipe.texts:
        ledger = Ledger(path.name, data.max_bad_share, TRAIN_DATA)
        count = 0
        for number, tokens in enumerate(_tokens([path], tokenizer, data, ledger), 1):
            count += len(tokens.ids)
            targets += num_targets(tokens)
            if number >= _DOCUMENTS and filled + count >= enough and targets:
                details.append(
                    f"{path.name}: only the first {number} documents were looked at, "
                    f"{count:,} tokens; bad rows behind them count in the run"
                )
                break
        else:
            details.append(f"{path.name}: {count:,} tokens")
        if ledger.bad and not data.max_bad_share:  # what lies behind cannot make up for it
            ledger.check()
        if ledger.has_losses:
            details.append(f"not all of it is used: {ledger.summary()}")
        filled += count
    if filled and not targets:
        raise _no_targets(f"{filled:,} tokens", recipe)
    if filled < enough:
        num_rows = -(-filled // recipe.sequence_length) if filled >= recipe.sequence_length else 0
        _check_batch(num_rows, _held_out(num_rows), recipe)
    trained = recipe.num_steps * recipe.batch_size * recipe.sequence_length
    share = targets / filled if filled else 1.0
    if share < _PLAIN_SHARE and share * trained < _FEW_TARGETS:  # the steps may meet none of them
        training_rows(tokenizer_folder, recipe)
    return "; ".join([*details, target_share(targets, filled)])


def num_targets(tokens: Tokens) -> int:
    """Tokens of a document that carry a loss: never its first, which nothing predicts."""
    if tokens.loss_mask is None:
        return max(0, len(tokens.ids) - 1)
    return int(tokens.loss_mask[1:].sum())


def _tokens(
    sources: list[Path],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataOptions,
    ledger: Ledger | None = None,
) -> Iterator[Tokens]:
    return tokenise_files(
        sources,
        tokenizer,
        text_column=data.text_column,
        assistant_only=data.chat.assistant_only,
        max_bad_share=data.max_bad_share,
        section=TRAIN_DATA,
        ledger=ledger,
    )


def _held_out(num_rows: int) -> int:
    return min(_MOST_HELD_OUT_ROWS, max(1, num_rows // _HELD_OUT_SHARE))


def _check_batch(num_rows: int, num_held_out: int, recipe: TrainOptions) -> None:
    if num_rows - num_held_out < recipe.batch_size:
        raise DataError(
            f"too little text: {num_rows} rows of {recipe.sequence_length} tokens, of which "
            f"{num_held_out} held out, are less than one batch of {recipe.batch_size}",
            where="recipe, train.data.sources",
            fix="add text, or lower batch_size or sequence_length",
        )
