"""How far each number of KV heads moves a model's outputs, without training, beside what it saves.

Drift is not loss of quality: uptraining heals most of it, and two models of one quality may be far
apart. It ranks choices and finds the layer where a conversion begins to hurt.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import scratch_folder
from upcycle.conversion.convert import check_request, convert
from upcycle.conversion.own_text import own_text_once
from upcycle.errors import EvaluationError
from upcycle.evaluation.drift import Difference, Drift, DriftSweep
from upcycle.evaluation.held_out import read_held_out
from upcycle.evaluation.scoring import Batch, batch_size_for, make_batches
from upcycle.families.implied import shape_in
from upcycle.families.retargets.view import retargeted
from upcycle.kvcache.counting import count_attention
from upcycle.kvcache.recommendation import nothing_to_merge
from upcycle.models.comparable import DTYPES, check_context
from upcycle.models.loading import choose_device, load_model, load_tokenizer
from upcycle.options.convert import ConvertOptions, MergeOptions
from upcycle.options.evaluate import EvaluateOptions
from upcycle.progress import Progress, Watcher, ignore

MERGING, READING = MergeOptions(), EvaluateOptions(max_tokens=4096)


def sweep_kv_heads(
    source: str | Path,
    merging: MergeOptions = MERGING,
    reading: EvaluateOptions = READING,
    *,
    kv_heads: Sequence[int] = (),
    watch: Watcher = ignore,
) -> DriftSweep:
    """Convert to each number of KV heads in a temporary folder and compare outputs with the source.

    Args:
        source: a checkpoint folder, a Hub cache snapshot, or a Hub id.
        merging: how heads are merged; on the device of `reading`.
        reading: the text, tokens, device and dtype of the comparison; it has no prompts or margins.
        kv_heads: numbers of KV heads; all that the model can be lowered to where empty, its own
            among them, which shows that nothing but heads moves outputs.
        watch: told how many tokens were read.

    Raises:
        CheckpointError: the source is damaged or contradicts itself.
        FamilyError: the source has no KV heads that can be merged.
        PlanError: a number of KV heads, or the method, is not possible.
        DataError: text that cannot be read.
        DeviceError: this machine lacks the device.
        EvaluationError: an unknown dtype, windows that are too long, or outputs that are
            not finite.
    """
    checkpoint = Checkpoint.open(source)
    shape = shape_in(retargeted(checkpoint))
    lowered = [g for g in shape.valid_kv_heads if g <= shape.num_key_value_heads]
    asked = sorted(set(kv_heads or lowered), reverse=True)
    place, precision = choose_device(reading.device), DTYPES[reading.dtype]
    placed = merging.model_copy(update={"device": reading.device})
    for heads in asked:
        check_request(checkpoint.folder, ConvertOptions(kv_heads=heads, **dict(placed)))
    tokenizer = load_tokenizer(checkpoint.folder)
    held_out = read_held_out(reading, tokenizer, section=None)
    reference = load_model(checkpoint.folder, dtype=precision, device=place)
    check_context(reference.config, reading.sequence_length, checkpoint.folder)
    size = batch_size_for(reference.config.vocab_size, reading.sequence_length)
    batches = make_batches(held_out.rows, size)
    counts = count_attention(checkpoint.config, length=reading.sequence_length)
    counted = {each.kv_heads: each for each in counts}
    total, done, used = held_out.text.tokens * len(asked), 0, ""

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        watch(Progress("sweep", done, total, "tokens"))

    choices = []
    with own_text_once(placed, checkpoint) as read:
        for heads in asked:
            with scratch_folder() as folder:
                converted = folder / "converted"
                options = ConvertOptions(kv_heads=heads, **dict(read))
                result = convert(checkpoint.folder, converted, options)
                model = load_model(converted, dtype=precision, device=place)
                used = result.plan.method
                logits, layers = _compare(reference, model, batches, count)
            choices.append(Drift(counted[heads], result.plan.output_bytes, logits, layers))
    return DriftSweep(
        num_key_value_heads=shape.num_key_value_heads,
        attention_layers=shape.num_layers,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        nothing_to_merge=nothing_to_merge(shape),
        method=used,
        device=place,
        dtype=reading.dtype,
        text=held_out.text,
        choices=tuple(choices),
    )


@dataclass
class _Accumulated:
    """Sums over the text of one kind of output."""

    identical: bool = True
    largest: float = 0.0
    magnitude: float = 0.0
    moved: float = 0.0
    whole: float = 0.0

    def add(self, source: Tensor, model: Tensor) -> None:
        """Take the outputs [T, ...] of both models for one window."""
        self.identical = self.identical and torch.equal(source, model)
        source, difference = source.double(), model.double() - source.double()
        self.largest = max(self.largest, difference.abs().max().item())
        self.magnitude = max(self.magnitude, source.abs().max().item())
        self.moved += difference.square().sum().item()
        self.whole += source.square().sum().item()

    def result(self) -> Difference:
        """What the sums say.

        Raises:
            EvaluationError: an output was not finite.
        """
        if not math.isfinite(self.moved + self.whole):
            raise EvaluationError(
                "outputs are not finite",
                where="logits or hidden states",
                fix="use --dtype float32; if it stays, the checkpoint is damaged",
            )
        return Difference(
            identical=self.identical,
            max_absolute=self.largest,
            max_relative=self.largest / self.magnitude if self.magnitude else 0.0,
            rms_relative=math.sqrt(self.moved / self.whole) if self.whole else 0.0,
        )


@torch.inference_mode()
def _compare(
    source: Any, model: Any, batches: Sequence[Batch], count: Callable[[int], None]
) -> tuple[Difference, tuple[Difference, ...]]:
    """Differences of the logits, and of the hidden state after each layer."""
    sums: list[_Accumulated] = []
    for batch in batches:
        for row in _outputs(source, model, batch):
            sums = sums or [_Accumulated() for _ in row]
            for accumulated, (expected, found) in zip(sums, row, strict=True):
                accumulated.add(expected, found)
        count(batch.num_scored)
    logits, *layers = [accumulated.result() for accumulated in sums]
    return logits, tuple(layers)


def _outputs(source: Any, model: Any, batch: Batch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each window the pairs of outputs [T, ...]: of the logits, then after each layer."""
    found = []
    for each in (source, model):
        outputs = each(
            input_ids=batch.ids.to(each.device), use_cache=False, output_hidden_states=True
        )
        found.append([outputs.logits, *outputs.hidden_states[1:]])
    for row, length in enumerate(batch.lengths):
        yield [
            (expected[row, :length], moved[row, :length])
            for expected, moved in zip(*found, strict=True)
        ]
