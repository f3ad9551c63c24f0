"""Documents to token ids."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from upcycle.data.chat import REFUSALS, RowError, chat_tokens
from upcycle.data.ledger import Document, Ledger
from upcycle.errors import DataError
from upcycle.utf8 import repaired

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokenisers slow down faster than the text grows, so a huge document goes in pieces.
_PIECE_CHARACTERS = 1 << 16
_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Tokens:
    """One tokenised document.

    Attributes:
        ids: [T] token ids, special tokens included.
        loss_mask: [T], False where no loss is wanted; None means all True.
        source: the document's file or file:row.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_] | None
    source: str


def document_affixes(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Ids that stand before and after every plain-text document.

    Before: what the tokenizer itself adds; or, where one token is both begin and end of text
    (GPT-2's way), that token. After: what it adds, or the end-of-text token.

    Raises:
        DataError: the tokenizer changes a text's own ids when it adds special tokens.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    starts = [i for i in range(len(full)) if full[i : i + len(plain)] == plain]
    if not starts:
        raise DataError(
            f"with special tokens 'a' becomes {full}, without them {plain}",
            where=f"the tokenizer, {type(tokenizer).__name__}",
            fix="use a tokenizer that only puts tokens before and after a text",
        )
    start = starts[0]
    before, after = full[:start], full[start + len(plain) :]
    eos = tokenizer.eos_token_id
    if eos is not None:
        if not before and tokenizer.bos_token_id == eos:
            before = [eos]
        after = after or [eos]
    return list(before), list(after)


def tokenise_documents(
    documents: Iterable[Document],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    assistant_only: bool = False,
    ledger: Ledger | None = None,
) -> Iterator[Tokens]:
    """Token ids of each document, in order.

    Plain text gets `document_affixes` once each; a chat is rendered by the tokenizer's own chat
    template and gets nothing else.

    Args:
        documents: text or chats.
        tokenizer: the source checkpoint's.
        assistant_only: mask all but the assistant's tokens of chats.
        ledger: of the documents' file; receives those that cannot be used, which are left out.

    Raises:
        DataError: `assistant_only` with a template that does not mark the assistant's turns;
            without a ledger also a chat that the template cannot render, text that the tokenizer
            cannot take, or `assistant_only` with plain text.
    """
    before, after = document_affixes(tokenizer)

    def tokens_of(document: Document, plain: list[int] | None) -> Tokens:
        if document.messages is not None:
            chat, mask = chat_tokens(
                document, tokenizer, assistant_only=assistant_only, ledger=ledger
            )
            return Tokens(chat, mask, document.source)
        if assistant_only:
            raise RowError(
                "assistant_only was asked for, but this row is plain text",
                where=document.source,
                fix="give chats in a 'messages' column, or turn assistant_only off",
            )
        ids = _encode_alone(document, tokenizer) if plain is None else plain
        # Text that already spells the special token out must not get it twice.
        head = [] if ids[: len(before)] == before else before
        tail = [] if ids[len(ids) - len(after) :] == after else after
        return Tokens(np.array([*head, *ids, *tail], np.int32), None, document.source)

    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        texts = [d.text for d in batch if d.text is not None and not assistant_only]
        plain = _encode_texts(texts, tokenizer)
        for document in batch:
            is_encoded = document.text is not None and not assistant_only
            try:
                found = tokens_of(document, next(plain) if is_encoded else None)
            except RowError as error:
                if ledger is None:
                    raise
                ledger.reject(document, error.what, error.fix)
                continue
            yield found


def decoded(
    tokenizer: "PreTrainedTokenizerBase", ids: Any, *, skip_special_tokens: bool = False
) -> str:
    """The text of token ids, in characters that files can hold."""
    text = tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(repaired(text))


def _encode_texts(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[list[int] | None]:
    """Ids of each text without special tokens added; None each where one cannot be encoded."""
    pieces = [list(text_pieces(text)) for text in texts]
    flat = [piece for parts in pieces for piece in parts]
    try:
        encoded = iter(_ids(flat, tokenizer) if flat else [])
    except REFUSALS:
        yield from (None for _ in texts)
        return
    for parts in pieces:
        yield [token for ids in islice(encoded, len(parts)) for token in ids]


def _encode_alone(document: Document, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids of one text.

    Raises:
        RowError: the tokenizer cannot take it.
    """
    assert document.text is not None
    try:
        encoded = _ids(list(text_pieces(document.text)), tokenizer)
    except REFUSALS as error:
        raise RowError(
            f"the tokenizer cannot take this text: {error}",
            where=document.source,
            fix="mend or remove the row",
        ) from error
    return [token for ids in encoded for token in ids]


def _ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def text_pieces(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Pieces of at most `size` characters, cut before white space where there is any."""
    start = 0
    while len(text) - start > size:
        end = start + size
        window = text[start + size // 2 : end]
        cut = max(window.rfind("\n"), window.rfind(" "))
        if cut > 0:
            end = start + size // 2 + cut
        yield text[start:end]
        start = end
    yield text[start:]
