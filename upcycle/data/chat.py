"""Chats rendered by the checkpoint's own template."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from upcycle.data.ledger import Document, Ledger
from upcycle.data.messages import with_text_arguments
from upcycle.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template and a tokenizer raise for what they cannot take.
REFUSALS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class RowError(DataError):
    """A document that cannot be used; others of its file may be."""


def chat_tokens(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    assistant_only: bool,
    ledger: Ledger | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
    """Ids [T] of one chat, and which of them the assistant said, if asked for.

    Args:
        document: the chat.
        tokenizer: with its template.
        assistant_only: whether to find the assistant's tokens.
        ledger: receives what the template does not read: tools, or keys of messages such as calls.

    Raises:
        RowError: there is no template, or it refuses this chat.
        DataError: the template does not mark the assistant's turns with `{% generation %}`.
    """
    if tokenizer.chat_template is None:
        raise RowError(
            "this row is a chat, but the tokenizer has no chat template",
            where=document.source,
            fix="add chat_template.jinja to the source, or give plain text",
        )
    assert document.messages is not None
    arguments = dict(document.arguments)
    try:
        template = tokenizer.get_chat_template(None, arguments.get("tools"))
    except REFUSALS as error:
        raise _refused(document, error) from error
    if assistant_only and "generation" not in _tags(template):
        raise DataError(
            "assistant_only needs a chat template that marks the assistant's turns",
            where="chat template of the source",
            fix="wrap them in {% generation %} … {% endgeneration %}, or turn assistant_only off",
        )

    def encoded(messages: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.int32], Any]:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            **arguments,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=assistant_only,
        )
        return np.array(found["input_ids"], np.int32), found.get("assistant_masks")

    try:
        ids, said = encoded(document.messages)
    except REFUSALS as error:
        as_text = with_text_arguments(document.messages)
        if as_text is None:
            raise _refused(document, error) from error
        try:  # templates of DeepSeek join them to other text
            ids, said = encoded(as_text)
        except REFUSALS:
            raise _refused(document, error) from error
    keys = {key for message in document.messages for key in message} - {"role", "content"}
    for name in sorted(arguments.keys() | keys):
        if ledger is not None and not re.search(rf"\b{re.escape(name)}\b", template):
            ledger.unused[f"unused {name!r}, which the chat template does not read"] += 1
    if not assistant_only:
        return ids, None
    return ids, np.array(said, np.bool_)


def _refused(document: Document, error: Exception) -> RowError:
    return RowError(
        f"the chat template cannot render this chat: {error}",
        where=document.source,
        fix="give messages with the roles and order that the model was trained with",
    )


def _tags(template: str) -> set[str]:
    """First words of the template's block tags."""
    return {part.lstrip("-+ \n\t").split(" ")[0] for part in template.split("{%")[1:]}
