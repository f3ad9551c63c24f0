"""Greedy continuations, and what their cache holds."""

from typing import TYPE_CHECKING, Any

import torch

from upcycle.data.tokens import document_affixes
from upcycle.errors import EvaluationError
from upcycle.utf8 import repaired

if TYPE_CHECKING:
    from transformers import Cache


@torch.inference_mode()
def greedy_tokens(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> list[int]:
    """Continue a prompt with the likeliest token each time, until EOS or `new_tokens`.

    A loop of our own: `generate` would apply the checkpoint's sampling settings, and batches would
    pad. One prompt at a time, BOS once where the tokenizer has it.

    Raises:
        EvaluationError: a prompt without tokens, or too long with its continuation.
    """
    ids = prompt_tokens(tokenizer, prompt, new_tokens, model.config)
    tokens: list[int] = []
    step, cache = torch.tensor([ids], device=model.device), None
    while len(tokens) < new_tokens:
        output = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
        token = int(output.logits[0, -1].argmax())
        tokens.append(token)
        if token == tokenizer.eos_token_id:
            break
        step, cache = torch.tensor([[token]], device=model.device), output.cache
    return tokens


def prompt_tokens(tokenizer: Any, prompt: str, new_tokens: int, config: Any) -> list[int]:
    """A prompt's ids, where a model can continue it by `new_tokens`.

    Raises:
        EvaluationError: there are no ids, or both together exceed the model's context.
    """
    before, _ = document_affixes(tokenizer)
    ids = [*before, *tokenizer(repaired(prompt), add_special_tokens=False)["input_ids"]]
    if not ids:
        raise EvaluationError(
            "an empty prompt has no token to start from",
            where="prompts",
            fix="give at least one character; this tokenizer has no BOS token",
        )
    longest = getattr(config, "max_position_embeddings", None)
    # The last new token is not read any more.
    if longest is not None and len(ids) + new_tokens - 1 > longest:
        raise EvaluationError(
            f"a prompt of {len(ids)} tokens and {new_tokens} new ones exceed the model's context "
            f"of {longest}",
            where=f"prompts, {prompt[:40]!r}",
            fix="shorten the prompt, or lower new_tokens",
        )
    return ids


def measured_cache_bytes(cache: "Cache") -> int:
    """Bytes of all key and value tensors that a transformers cache holds now.

    The states of layers without attention are not counted.
    """
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
