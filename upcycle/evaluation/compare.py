"""Compare checkpoints with their source on the same held-out text."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upcycle.checkpoint.headers import DTYPE_BITS
from upcycle.checkpoint.reader import Checkpoint
from upcycle.data.tokens import decoded
from upcycle.data.windows import EvalRow
from upcycle.errors import EvaluationError
from upcycle.evaluation.held_out import read_held_out
from upcycle.evaluation.results import (
    Comparison,
    Continuation,
    Divergence,
    EvaluationSettings,
    Generation,
    KVCache,
    Model,
    NoiseFloor,
    Text,
    judge,
)
from upcycle.evaluation.scoring import (
    Batch,
    Scores,
    batch_size_for,
    make_batches,
    one_by_one,
    score_pair,
    whole_batches,
)
from upcycle.evaluation.statistics import RESAMPLES, divergence, worst_tokens
from upcycle.families import shape_of
from upcycle.kvcache.counting import kv_cache_bytes
from upcycle.models.comparable import DTYPES, check_context, check_same_tokenizer
from upcycle.models.generation import greedy_tokens, measured_cache_bytes
from upcycle.models.loading import choose_device, load_model, load_tokenizer
from upcycle.options.evaluate import DEFAULTS, EvaluateOptions
from upcycle.progress import Progress, Watcher, ignore
from upcycle.utf8 import repaired, shown

NOISE_WINDOWS = 8


@dataclass(frozen=True)
class _Loaded:
    """A checkpoint with its model in memory."""

    label: str
    checkpoint: Checkpoint
    model: Any


@dataclass(frozen=True)
class _Outcome:
    """A candidate after its turn, its weights gone again."""

    model: Model
    source_nll: NDArray[np.float32]
    tokens: list[list[int]]


def evaluate(
    source: str | Path,
    candidates: Sequence[str | Path],
    options: EvaluateOptions = DEFAULTS,
    *,
    watch: Watcher = ignore,
) -> Comparison:
    """Measure what each candidate lost against the source, and what it saved.

    Source and candidate run side by side, batch by batch, on windows that never mix documents;
    two models are in memory at a time and nothing is kept but a few numbers per token.

    Args:
        source: folder or Hub id of the source.
        candidates: the converted and uptrained checkpoints; the last one is judged.
        options: on which text, how, and what may be lost.
        watch: told how many tokens were scored.

    Raises:
        EvaluationError: models that cannot be compared.
        DeviceError: this machine lacks the device.
        CheckpointError: a folder that is no checkpoint.
        FamilyError: a model whose attention is not known.
        DataError: text that cannot be read.
    """
    sequence_length, new_tokens = options.sequence_length, options.new_tokens
    prompts = repaired(list(options.prompts))
    if not candidates:
        raise EvaluationError(
            "there is nothing to compare the source with",
            where="candidates",
            fix="name at least one converted checkpoint",
        )
    place, precision = choose_device(options.device), DTYPES[options.dtype]
    checkpoints = [Checkpoint.open(folder) for folder in (source, *candidates)]
    labels = labels_of([checkpoint.folder for checkpoint in checkpoints[1:]])
    tokenizer = load_tokenizer(checkpoints[0].folder)
    for checkpoint in checkpoints[1:]:
        check_same_tokenizer(tokenizer, load_tokenizer(checkpoint.folder), checkpoint.folder)
    held_out = read_held_out(options, tokenizer)

    def load(index: int) -> _Loaded:
        model = load_model(checkpoints[index].folder, dtype=precision, device=place)
        check_context(model.config, sequence_length, checkpoints[index].folder)
        return _Loaded(labels[index], checkpoints[index], model)

    def greedy(loaded: _Loaded) -> list[list[int]]:
        return [greedy_tokens(loaded.model, tokenizer, prompt, new_tokens) for prompt in prompts]

    reference = load(0)
    size = batch_size_for(reference.model.config.vocab_size, sequence_length)
    batches = make_batches(held_out.rows, size)
    noisy = make_batches(_spread_out(held_out.rows, NOISE_WINDOWS), size)
    count = _counter(watch, [*noisy, *batches * len(candidates)])
    noise_floor = _noise_floor(reference.model, noisy, count)

    def turn(index: int) -> _Outcome:
        candidate = load(index)
        scores = score_pair(
            whole_batches(reference.model),
            whole_batches(candidate.model),
            batches,
            label=candidate.label,
            on_tokens=count,
        )
        change = divergence(scores, worst_tokens(scores, held_out.rows, tokenizer))
        summary = _model(candidate, scores.model_nll, held_out.text, change)
        return _Outcome(summary, scores.source_nll, greedy(candidate))

    outcomes = [turn(index) for index in range(1, len(checkpoints))]
    models = [
        _model(reference, outcomes[0].source_nll, held_out.text, None),
        *(outcome.model for outcome in outcomes),
    ]
    tokens = [greedy(reference), *(outcome.tokens for outcome in outcomes)]
    generations = [
        Generation(
            prompt,
            [
                continuation(label, of_model[which], tokens[0][which], tokenizer)
                for label, of_model in zip(labels, tokens, strict=True)
            ],
        )
        for which, prompt in enumerate(prompts)
    ]
    return Comparison(
        text=held_out.text,
        settings=EvaluationSettings(place, options.dtype, size, new_tokens, RESAMPLES),
        models=models,
        noise_floor=noise_floor,
        generations=generations,
        margins=judge(models[-1], options.margins),
    )


def _spread_out(rows: list[EvalRow], count: int) -> list[EvalRow]:
    """At most `count` windows, evenly over the text, so that long and short ones are among them."""
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else rows


def _counter(watch: Watcher, batches: Sequence[Batch]) -> Callable[[int], None]:
    """Turns counts of scored tokens into progress over all batches that are to come."""
    total = sum(batch.num_scored for batch in batches)
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        watch(Progress("evaluate", done, total, "tokens"))

    return count


def _noise_floor(model: Any, batches: Sequence[Batch], count: Callable[[int], None]) -> NoiseFloor:
    """The source against itself, whole batches against single rows."""
    scores: Scores = score_pair(
        whole_batches(model), one_by_one(model), batches, label="the source", on_tokens=count
    )
    difference = np.abs(scores.model_nll.astype(np.float64) - scores.source_nll)
    return NoiseFloor(
        batch_sizes=[max(len(batch.lengths) for batch in batches), 1],
        tokens=len(difference),
        kl_mean=float(scores.kl.mean(dtype=np.float64)),
        kl_max=float(scores.kl.max()),
        nll_difference_mean=float(difference.mean()),
        nll_difference_max=float(difference.max()),
        top1_agreement=float(scores.agree.mean()),
    )


def _model(
    loaded: _Loaded, nll: NDArray[np.float32], text: Text, change: Divergence | None
) -> Model:
    shape = shape_of(loaded.checkpoint.config)
    total = float(nll.sum(dtype=np.float64))
    return Model(
        label=loaded.label,
        num_parameters=loaded.checkpoint.num_parameters,
        weight_bytes=loaded.checkpoint.weight_bytes,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        kv_cache=kv_cache_of(loaded.checkpoint, loaded.model),
        nll=total / len(nll),
        perplexity=_perplexity(total, len(nll)),
        word_perplexity=_perplexity(total, text.words),
        bits_per_byte=total / math.log(2) / text.bytes,
        divergence=change,
    )


def _perplexity(nats: float, units: int) -> float | None:
    """exp(nats / units), or None where that says nothing any more."""
    return math.exp(nats / units) if nats < 100 * units else None


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A distinct label for the source and each candidate: "source", then the folders' names."""
    labels = ["source"]
    for folder in folders:
        name, turn = shown(folder.resolve().name), 1
        label = name
        while label in labels:
            turn += 1
            label = f"{name} ({turn})"
        labels.append(label)
    return labels


def continuation(
    label: str, tokens: Sequence[int], source_tokens: Sequence[int], tokenizer: Any
) -> Continuation:
    """A continuation's text, split at the first token that differs from the source's."""
    at = first_divergence(source_tokens, tokens)
    text = decoded(tokenizer, tokens)
    if at is None:
        agreed, through = text, text
    else:
        # A token may end within a character, which decodes to a replacement sign until the next.
        agreed = _shared(decoded(tokenizer, tokens[:at]), text)
        through = _shared(decoded(tokenizer, tokens[: at + 1]), text)
    return Continuation(
        label=label,
        tokens=list(tokens),
        first_divergence=at,
        agreed=agreed,
        diverging=through[len(agreed) :],
        rest=text[len(through) :],
        repetition=repetition(tokens),
    )


def first_divergence(source: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None for equal sequences."""
    for index, (ours, theirs) in enumerate(zip(tokens, source, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(source) else min(len(tokens), len(source))


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before: seq-rep-n of Welleck et al. 2020 (1908.04319)."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _shared(start: str, text: str) -> str:
    """What two texts have in common from the left."""
    pairs = enumerate(zip(start, text, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(start), len(text)))
    return text[:length]


_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MEASURED_TOKENS = 16


def kv_cache_of(checkpoint: Checkpoint, model: Any) -> KVCache:
    """What one token takes in the cache: from the configuration, and in a real cache object."""
    stored = stored_dtype(checkpoint)
    element = torch.finfo(model.dtype).bits // 8
    return KVCache(
        stored_dtype=_NAMES.get(stored, stored),
        bytes_per_token=kv_cache_bytes(
            checkpoint.config, bytes_per_element=DTYPE_BITS[stored] // 8
        ),
        measured_dtype=str(model.dtype).removeprefix("torch."),
        predicted_bytes_per_token=kv_cache_bytes(checkpoint.config, bytes_per_element=element),
        measured_bytes_per_token=measured_bytes_per_token(model),
    )


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The safetensors dtype that holds most of the weights' bytes."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0]


@torch.inference_mode()
def measured_bytes_per_token(model: Any, length: int = _MEASURED_TOKENS) -> float:
    """Bytes of all key and value tensors after a forward pass over `length` tokens, per token."""
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    cache = model(input_ids=ids, use_cache=True).cache
    return measured_cache_bytes(cache) / length
