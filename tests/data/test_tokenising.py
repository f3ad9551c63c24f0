"""Token ids: special tokens exactly once, huge documents in pieces, chats by their template."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.tiny import byte_tokenizer
from upcycle.data.ledger import Document
from upcycle.data.tokens import (
    document_affixes,
    text_pieces,
    tokenise_documents,
)
from upcycle.errors import DataError

GENERATION_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)
CHAT = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
)


def tokenizer(*, adds_bos: bool = False, shared: bool = True, template: str | None = None):  # noqa: ANN201
    """A byte tokenizer that knows <s> and </s>, or one token for both."""
    found = byte_tokenizer()
    if not shared:
        found = PreTrainedTokenizerFast(
            tokenizer_object=found.backend_tokenizer, bos_token="<s>", eos_token="</s>"
        )
    if adds_bos:
        bos = found.bos_token
        found.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, found.bos_token_id)]
        )
    found.chat_template = template
    return found


def ids_of(document: Document, tok: PreTrainedTokenizerFast, **options: bool) -> list[int]:
    (tokens,) = tokenise_documents([document], tok, **options)
    return tokens.ids.tolist()


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_special_tokens_stand_once(adds_bos: bool, shared: bool) -> None:
    tok = tokenizer(adds_bos=adds_bos, shared=shared)
    before, after = document_affixes(tok)
    assert before == ([tok.bos_token_id] if adds_bos or shared else [])
    assert after == [tok.eos_token_id]
    body = tok("text", add_special_tokens=False)["input_ids"]
    assert ids_of(Document("d", text="text"), tok) == [*before, *body, *after]


def test_text_that_spells_the_special_tokens_out_keeps_them_single() -> None:
    tok = tokenizer(adds_bos=True, shared=False)
    ids = ids_of(Document("d", text="<s>text</s>"), tok)
    assert ids.count(tok.bos_token_id) == 1
    assert ids.count(tok.eos_token_id) == 1


def test_documents_keep_their_order_across_batches() -> None:
    tok = tokenizer()
    documents = [Document(str(i), text="x" * (i + 1)) for i in range(150)]
    found = list(tokenise_documents(documents, tok))
    assert [tokens.source for tokens in found] == [str(i) for i in range(150)]
    assert [len(tokens.ids) for tokens in found] == [i + 3 for i in range(150)]


@given(
    st.text(alphabet="ab \n", max_size=300),
    st.integers(min_value=2, max_value=40),
)
@settings(max_examples=100, deadline=None)
def test_pieces_make_up_the_text(text: str, size: int) -> None:
    pieces = list(text_pieces(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)


def test_a_cut_falls_before_white_space() -> None:
    assert list(text_pieces("aaaaa bbbbb\nccc", 8)) == ["aaaaa", " bbbbb", "\nccc"]
    assert list(text_pieces("a" * 20, 8)) == ["a" * 8, "a" * 8, "a" * 4]


def test_a_chat_is_rendered_by_the_template() -> None:
    tok = tokenizer(template=PLAIN_TEMPLATE, adds_bos=True)
    expected = "[user]hi[assistant]hello[user]bye[assistant]ciao"
    assert (
        ids_of(Document("d", messages=CHAT), tok)
        == (tok(expected, add_special_tokens=False)["input_ids"])
    )


def test_assistant_only_masks_everything_else() -> None:
    tok = tokenizer(template=GENERATION_TEMPLATE)
    (tokens,) = tokenise_documents([Document("d", messages=CHAT)], tok, assistant_only=True)
    assert tokens.loss_mask is not None
    assert tok.decode(tokens.ids[tokens.loss_mask]) == "hellociao"
    assert tokens.ids.dtype == np.int32


@pytest.mark.parametrize(
    ("template", "document", "assistant_only", "message"),
    [
        (None, Document("f:3", messages=CHAT), False, "no chat template"),
        (PLAIN_TEMPLATE, Document("f:3", messages=CHAT), True, "marks the assistant's turns"),
        (GENERATION_TEMPLATE, Document("f:3", text="plain"), True, "this row is plain text"),
        (
            PLAIN_TEMPLATE,
            Document("f:3", messages=({"role": "system", "content": "x"},)),
            False,
            "cannot render this chat: no system role",
        ),
    ],
)
def test_chats_that_cannot_be_used(
    template: str | None, document: Document, assistant_only: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ids_of(document, tokenizer(template=template), assistant_only=assistant_only)
