"""Keep the tokenizer of a model that changes its class.

transformers chooses a tokenizer's class by the model's type as well as by the tokenizer's own
files: for GPTBigCode and Nemotron it reads `tokenizer.json` alone, which GPT-2 and OPT checkpoints
often lack, and knows no class's default special tokens.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.errors import CheckpointError
from upcycle.models.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = (
    "Hello world, it's 1234567 o'clock!",
    "  two  spaces\n\n\tdef f(x):\n        return x ** 2\r\n",
    "naïve Größe, ﬁ ligature, e\u0301, 東京タワー, Привет, مرحبا, 🙂👍🏽",
)


def keep_tokenizer(source: Path, output: Path) -> bool:
    """Save the source's tokenizer anew where the output's copied files would give another one.

    Args:
        source: the checkpoint's folder.
        output: a folder with the new `config.json` and the copied tokenizer files.

    Returns:
        Whether it was saved anew.

    Raises:
        CheckpointError: even so the output would have another tokenizer.
    """
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError:
        return False  # there is none, or none that could change
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        return False  # made of nothing, as transformers does for folders without tokenizer files
    wanted = _behaviour(tokenizer)
    if _loaded(output) == wanted:
        return False
    tokenizer.save_pretrained(output)
    if _loaded(output) != wanted:
        raise CheckpointError(
            f"the converted model would not get its tokenizer, {type(tokenizer).__name__}: "
            "transformers takes another one for its new class",
            where=str(source),
            fix="move the tokenizer's files out of the source, and load the tokenizer from there",
        )
    return True


def _loaded(folder: Path) -> dict[str, Any] | None:
    try:
        return _behaviour(load_tokenizer(folder))
    except CheckpointError:
        return None


def _behaviour(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What a model and its users notice of a tokenizer."""
    special = tokenizer.special_tokens_map
    texts = [*_PROBES, *(f"a{token} b" for token in special.values() if isinstance(token, str))]

    def ids(text: str, add_special_tokens: bool) -> list[int]:
        # Not verbose, since the probes may be longer than a small model's context.
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    return {
        "vocabulary": tokenizer.get_vocab(),
        "special": special,
        "ids": [ids(text, True) for text in texts],
        "bare ids": [ids(text, False) for text in texts],
        "decoded": [tokenizer.decode(ids(text, True)) for text in texts],
        "padding": tokenizer.padding_side,
        "longest": tokenizer.model_max_length,
        "chat": tokenizer.chat_template,
    }
