"""Greedy continuations against transformers' own, and where they part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from tests.tiny import byte_tokenizer, tiny_model
from upcycle.errors import EvaluationError
from upcycle.evaluation.compare import continuation, first_divergence, repetition
from upcycle.models.generation import greedy_tokens

TOKENIZER = byte_tokenizer()
TOKENS = st.lists(st.integers(1, 256), max_size=12)


def test_greedy_tokens_are_those_of_generate() -> None:
    model = tiny_model(num_key_value_heads=2)
    prompt = "def main("
    ids = TOKENIZER("<|endoftext|>" + prompt, return_tensors="pt")["input_ids"]
    settings = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=0, pad_token_id=0)
    expected = model.generate(ids, generation_config=settings)[0, ids.shape[1] :].tolist()
    assert greedy_tokens(model, TOKENIZER, prompt, 20) == expected


def test_greedy_decoding_stops_after_the_end_of_text() -> None:
    model = tiny_model()
    free = greedy_tokens(model, TOKENIZER, "x", 8)
    last = next(token for token in free if token != free[0])
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(last)
    stopped = greedy_tokens(model, tokenizer, "<|endoftext|>x", 8)
    assert stopped == free[: free.index(last) + 1]


def test_a_prompt_without_tokens_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(EvaluationError, match="empty prompt"):
        greedy_tokens(tiny_model(), tokenizer, "", 4)


@pytest.mark.parametrize(
    ("source", "tokens", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [4, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
    ],
)
def test_first_divergence(source: list[int], tokens: list[int], expected: int | None) -> None:
    assert first_divergence(source, tokens) == expected


@given(source=TOKENS, tokens=TOKENS)
def test_the_three_pieces_are_the_whole_text(source: list[int], tokens: list[int]) -> None:
    """Byte tokens cut characters in two, which must not lose or double text."""
    found = continuation("model", tokens, source, TOKENIZER)
    text = TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)
    assert found.agreed + found.diverging + found.rest == text
    assert (found.first_divergence is None) == (source == tokens)
    if found.first_divergence is None:
        assert found.agreed == text


def test_the_diverging_token_is_cut_out() -> None:
    def ids(text: str) -> list[int]:
        return TOKENIZER(text, add_special_tokens=False)["input_ids"]

    found = continuation("model", ids("return 1\n"), ids("return 0\n"), TOKENIZER)
    assert (found.agreed, found.diverging, found.rest) == ("return ", "1", "\n")


def test_repetition_counts_repeated_fourgrams() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([7] * 12) == pytest.approx(8 / 9)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    model = tiny_model(max_position_embeddings=16)
    prompt = "x" * 11  # and BOS
    assert len(greedy_tokens(model, TOKENIZER, prompt, 5)) == 5
    with pytest.raises(EvaluationError, match=r"12 tokens and 6 new ones exceed .* of 16"):
        greedy_tokens(model, TOKENIZER, prompt, 6)
