"""One huge document takes days to tokenise (hiyouga/LlamaFactory#2255).

Also mosaicml/llm-foundry PR #1240, where cutting it made two days eight minutes. The tokenizer must
never see more than a piece of it.
"""

from typing import Any

from tests.tiny import byte_tokenizer
from upcycle.data.ledger import Document
from upcycle.data.tokens import tokenise_documents


class Watched:
    """A tokenizer that remembers the longest text it was given."""

    def __init__(self) -> None:
        self._inner = byte_tokenizer()
        self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, texts: str | list[str], **options: Any) -> Any:
        given = [texts] if isinstance(texts, str) else texts
        self.longest = max([self.longest, *map(len, given)])
        return self._inner(texts, **options)


def test_a_huge_line_without_spaces_goes_in_pieces() -> None:
    tokenizer: Any = Watched()
    text = "ab" * 500_000
    (tokens,) = tokenise_documents([Document("d", text=text)], tokenizer)
    assert tokenizer.longest <= 1 << 16
    assert tokenizer.decode(tokens.ids[1:-1].tolist()) == text
