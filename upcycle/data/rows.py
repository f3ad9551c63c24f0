"""A row of a file as a document: which of its keys is the text, and what else of it is used."""

import json
from collections.abc import Mapping
from typing import Any

from upcycle.data.ledger import Document, Ledger
from upcycle.data.messages import UnusableError, messages_of
from upcycle.utf8 import repaired

TEXT_COLUMN = "text"
CHATS = ("messages", "conversations")
PAIR = ("prompt", "completion")
TOOLS, DOCUMENTS, KWARGS = "tools", "documents", "chat_template_kwargs"
# What a row may have for its chat template, under the names that transformers and TRL use.
THINKING, SYSTEM = "enable_thinking", "system"
# `functions` is what tools were called before; few templates read it.
ARGUMENTS = (TOOLS, DOCUMENTS, THINKING, "functions")
# Arguments of `apply_chat_template` that are no business of a row.
_RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "tokenize", "tokenizer_kwargs", "truncation", "processor_kwargs",
}  # fmt: skip


def columns_of(text_column: str | None) -> list[str]:
    """Every key of a row that may be read."""
    return [text_column or TEXT_COLUMN, *CHATS, *PAIR, SYSTEM, *ARGUMENTS, KWARGS]


def document_of(
    row: Mapping[str, Any], where: str, text_column: str | None, ledger: Ledger
) -> Document | None:
    """The document in a row, or None after counting why there is none.

    A row has its text as a chat in `messages` or `conversations`, as plain text, or as a `prompt`
    with its `completion`. Where it has several, one is used and the others are counted: plain text
    if `text_column` names it, else the first in the order above.
    `text_column` may also name a chat.

    Args:
        row: keys and values.
        where: file and line.
        text_column: the key of plain text; None for "text", unnamed.
        ledger: receives the counts.
    """
    column = text_column or TEXT_COLUMN
    found = _forms(row, column, named=text_column is not None)
    if not found:
        known = {column, *CHATS, *(PAIR if set(PAIR) <= row.keys() else ())}
        if any(row.get(key) is not None for key in known):
            reason = "empty"
        else:
            reason = f"null {column!r}" if column in row else f"without {column!r}"
        ledger.dropped[reason] += 1
        return None
    try:
        document = _document(row, where, found[0], column)
        whole = repaired_document(document)
    except UnusableError as error:
        ledger.refuse(where, str(error))
        return None
    except RecursionError:
        ledger.refuse(where, "nested too deeply")
        return None
    ledger.kept += 1
    ledger.repaired += whole != document
    others = found[1:]
    if document.messages is None:
        others += [key for key in (SYSTEM, *ARGUMENTS, KWARGS) if _is_given(row.get(key))]
    for other in others:
        ledger.unused[f"unused {other!r} beside {found[0]!r}"] += 1
    return whole


def repaired_document(document: Document) -> Document:
    """The same document in characters that a tokenizer can take."""
    return Document(
        document.source,
        repaired(document.text),
        repaired(document.messages),
        repaired(document.arguments),
    )


def _forms(row: Mapping[str, Any], column: str, *, named: bool) -> list[str]:
    """The keys under which a row has text, the one to use first; a pair as its first key."""
    texts = [key for key in (column,) if _is_given(row.get(key))]
    chats = [key for key in CHATS if key != column and _is_given(row.get(key))]
    if texts:  # a column may be called `messages` and be none
        chats = [key for key in chats if isinstance(row[key], list)]
    pairs = [PAIR[0]] if all(_is_given(row.get(key)) and key != column for key in PAIR) else []
    return [*texts, *chats, *pairs] if named else [*chats, *texts, *pairs]


def _is_given(value: Any) -> bool:
    return value not in (None, [], {}) and not (isinstance(value, str) and not value.strip())


def _document(row: Mapping[str, Any], where: str, key: str, column: str) -> Document:
    if key == column and not isinstance(row[key], list):
        text = row[key]
        if not isinstance(text, str):
            raise UnusableError(f"{key!r} is not text: {type(text).__name__}")
        return Document(where, text=text)
    if key == PAIR[0]:
        prompt, completion = (row[part] for part in PAIR)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document(where, text=prompt + completion)
        messages = [
            message
            for part in PAIR
            for message in messages_of(
                row[part], key=part, system=row.get(SYSTEM) if part == PAIR[0] else None
            )
        ]
    else:
        messages = messages_of(row[key], key=key, system=row.get(SYSTEM))
    return Document(where, messages=tuple(messages), arguments=_arguments(row))


def _arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the row gives its chat template beside messages; some store it as text in JSON."""
    extra = _decoded(row, KWARGS, Mapping) or {}
    for name in sorted(_RESERVED & extra.keys()):
        raise UnusableError(f"{KWARGS!r} cannot set {name}")
    thinking = row.get(THINKING)
    if thinking is not None and not isinstance(thinking, bool):  # templates ask for its truth
        raise UnusableError(f"{THINKING!r} is not true or false: {type(thinking).__name__}")
    lists = {name: _decoded(row, name, list) for name in ARGUMENTS if name != THINKING}
    given = {**extra, **lists, THINKING: thinking}
    return {
        name: extra.get(name) if value is None else value
        for name, value in given.items()
        if value is not None or extra.get(name) is not None
    }


def _decoded(row: Mapping[str, Any], key: str, kind: type) -> Any:
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise UnusableError(f"{key!r} is not JSON: {error}") from error
    if not value:  # nothing, or an empty list, which means the same
        return None
    if not isinstance(value, kind):
        raise UnusableError(f"{key!r} is not what chat templates take: {type(value).__name__}")
    return value
