"""What can be compared, on what: dtypes, contexts, tokenizers."""

from pathlib import Path
from typing import Any

import torch

from upcycle.errors import EvaluationError
from upcycle.options.base import Dtype

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PROBE = "def main(argv: list[str]) -> int:\n    return 0  # naïve café, 12345\n"


def check_context(
    config: Any, sequence_length: int, folder: Path, *, key: str = "--sequence-length"
) -> None:
    """Refuse windows that are longer than a model's context, by the name of the option that is.

    Raises:
        EvaluationError: they are.
    """
    longest = getattr(config, "max_position_embeddings", None)  # some families have no limit
    if longest is not None and sequence_length > longest:
        raise EvaluationError(
            f"windows of {sequence_length} tokens exceed the model's context of {longest}",
            where=f"{key}; {folder}",
            fix=f"set {key} to at most {longest}",
        )


def check_same_tokenizer(source: Any, candidate: Any, folder: Path) -> None:
    """Per-token numbers pair up only where both models read the same tokens.

    Raises:
        EvaluationError: the tokenizers differ in vocabulary, special tokens or how they split.
    """
    differences = {
        "vocabulary": source.get_vocab() != candidate.get_vocab(),
        "EOS token": source.eos_token_id != candidate.eos_token_id,
        "BOS token": source.bos_token_id != candidate.bos_token_id,
        "split of a probe text": source(_PROBE)["input_ids"] != candidate(_PROBE)["input_ids"],
    }
    if any(differences.values()):
        found = ", ".join(name for name, differs in differences.items() if differs)
        raise EvaluationError(
            f"its tokenizer is not the source's: different {found}",
            where=str(folder),
            fix="copy the source's tokenizer files beside the weights, or compare another model",
        )
