"""Documents to token ids."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from upcycle.data.chat import chat_tokens
from upcycle.data.ledger import Document
from upcycle.errors import DataError

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
) -> Iterator[Tokens]:
    """Token ids of each document, in order.

    Plain text gets `document_affixes` once each; a chat is rendered by the tokenizer's own chat
    template and gets nothing else.

    Args:
        documents: text or chats.
        tokenizer: the source checkpoint's.
        assistant_only: mask all but the assistant's tokens of chats.

    Raises:
        DataError: a chat that the template cannot render; `assistant_only` with plain text or with
            a template that does not mark the assistant's turns.
    """
    before, after = document_affixes(tokenizer)
    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        texts = [document.text for document in batch if document.text is not None]
        plain = iter(_encode_texts(texts, tokenizer))
        for document in batch:
            if document.messages is not None:
                chat, mask = chat_tokens(document, tokenizer, assistant_only=assistant_only)
                yield Tokens(chat, mask, document.source)
                continue
            if assistant_only:
                raise DataError(
                    "assistant_only was asked for, but this row is plain text",
                    where=document.source,
                    fix="give chats in a 'messages' column, or turn assistant_only off",
                )
            ids = next(plain)
            # Text that already spells the special token out must not get it twice.
            head = [] if ids[: len(before)] == before else before
            tail = [] if ids[len(ids) - len(after) :] == after else after
            yield Tokens(np.array([*head, *ids, *tail], np.int32), None, document.source)


def _encode_texts(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[list[int]]:
    """Ids without special tokens added."""
    pieces = [list(text_pieces(text)) for text in texts]
    flat = [piece for parts in pieces for piece in parts]
    encoded = iter(
        tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else []
    )
    for parts in pieces:
        yield [token for ids in islice(encoded, len(parts)) for token in ids]


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
