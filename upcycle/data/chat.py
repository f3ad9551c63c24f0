"""Chats rendered by the checkpoint's own template."""

from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from upcycle.data.ledger import Document
from upcycle.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_tokens(
    document: Document, tokenizer: "PreTrainedTokenizerBase", *, assistant_only: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
    """Ids [T] of one chat, and which of them the assistant said, if asked for.

    Raises:
        DataError: there is no template, it refuses this chat, or it does not mark the assistant's
            turns with `{% generation %}`.
    """
    template = tokenizer.chat_template
    if template is None:
        raise DataError(
            "this row is a chat, but the tokenizer has no chat template",
            where=document.source,
            fix="add chat_template.jinja to the source, or give plain text",
        )
    if assistant_only and "generation" not in _tags(str(template)):
        raise DataError(
            "assistant_only needs a chat template that marks the assistant's turns",
            where="chat template of the source",
            fix="wrap them in {% generation %} … {% endgeneration %}, or turn assistant_only off",
        )
    assert document.messages is not None
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in document.messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=assistant_only,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"the chat template cannot render this chat: {error}",
            where=document.source,
            fix="give messages with the roles and order that the model was trained with",
        ) from error
    ids = np.array(encoded["input_ids"], np.int32)
    if not assistant_only:
        return ids, None
    return ids, np.array(encoded["assistant_masks"], np.bool_)


def _tags(template: str) -> set[str]:
    """First words of the template's block tags."""
    return {part.lstrip("-+ \n\t").split(" ")[0] for part in template.split("{%")[1:]}
