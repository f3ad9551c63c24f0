"""Text that a model writes itself: chats through its own template, or pages from BOS on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import write_file
from upcycle.data.chat import REFUSALS, chat_tokens
from upcycle.data.documents import packaged_text
from upcycle.data.ledger import Document
from upcycle.data.tokens import decoded, document_affixes
from upcycle.errors import DataError
from upcycle.kvcache.sampling import AT_ONCE
from upcycle.models.loading import class_config, load_model, load_tokenizer, quiet
from upcycle.progress import Progress, Watcher, ignore
from upcycle.utf8 import to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPERATURE = 0.7
_ANSWER, _PAGE = 256, 512  # tokens at most
_SHORTEST = 16  # tokens that must fit behind a prompt
_LOOKED_AT = 64  # texts before the model is given up
_USEFUL = 0.1  # of them at least
_GRAM, _DISTINCT = 4, 0.5  # a loop has fewer distinct n-grams than this share


@dataclass
class OwnText:
    """What became of the texts that a model wrote.

    Attributes:
        chats: whether they are chats; else pages from the first token on.
        kept: how many are in the file.
        tokens: of these, with their prompts, as calibration reads them.
        empty: answers that were dropped since nothing is in them.
        loops: answers that were dropped since they repeat themselves.
        unfinished: kept answers that reached the limit of tokens.
        temperature: of the sampling.
        seed: of the sampling and of the prompts' order.
    """

    chats: bool
    seed: int
    temperature: float = TEMPERATURE
    kept: int = 0
    tokens: int = 0
    empty: int = 0
    loops: int = 0
    unfinished: int = 0

    def summary(self) -> str:
        """One line for people."""
        what = "chats" if self.chats else "pages from BOS alone, as there is no chat template"
        return (
            f"{self.kept} {what} by the source itself, {self.tokens:,} tokens at temperature "
            f"{self.temperature}, seed {self.seed}; dropped: {self.empty} empty, {self.loops} "
            f"loops; {self.unfinished} cut at the limit"
        )


def write_own_text(
    checkpoint: Checkpoint,
    path: Path,
    *,
    tokens: int,
    seed: int,
    device: str,
    watch: Watcher = ignore,
) -> OwnText:
    """Have a model write text until there are enough tokens, one JSON row each.

    With a chat template it answers the packaged prompts, of which about half ask once more about
    the answer; without one it writes pages from BOS on. The same seed gives the same file on the
    same machine.

    Args:
        checkpoint: the model, held whole in the dtype that it is stored in; fp16 as bf16 on a CPU.
        path: the .jsonl to write.
        tokens: how many at least, prompts counted.
        seed: of the sampling and of the prompts' order.
        device: see `choose_device`, "auto" excepted.
        watch: told the tokens that are there.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        DataError: the template refuses a user's plain turn; there is no token to begin with; or
            nearly all that the model writes is empty or a loop.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    model = load_model(checkpoint.folder, dtype=_dtype(checkpoint, device), device=device)
    chats = tokenizer.chat_template is not None
    writer = _Writer(model, tokenizer, OwnText(chats, seed))
    rows = writer.chats() if chats else writer.pages()
    lines: list[str] = []
    devices = [torch.device(device)] if device == "cuda" else []
    with torch.random.fork_rng(devices), quiet():
        torch.manual_seed(seed)
        for row, length in rows:
            lines.append(to_json(row) + "\n")
            writer.text.kept += 1
            writer.text.tokens += length
            watch(Progress("self", min(writer.text.tokens, tokens), tokens, "tokens"))
            if writer.text.tokens >= tokens:
                break
    write_file(path, "".join(lines))
    return writer.text


def _dtype(checkpoint: Checkpoint, device: str) -> torch.dtype:
    stored = class_config(checkpoint.config).dtype or torch.float32
    return torch.bfloat16 if stored == torch.float16 and device == "cpu" else stored


@dataclass
class _Writer:
    """A model that writes, and the counts of what it wrote."""

    model: Any
    tokenizer: "PreTrainedTokenizerBase"
    text: OwnText
    _looked_at: int = field(default=0, init=False)

    def chats(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Chats as rows, each with its tokens, without end."""
        prompts = [
            json.loads(line)["turns"]
            for line in packaged_text("prompts").read_text(encoding="utf-8").splitlines()
        ]
        order = torch.Generator().manual_seed(self.text.seed)
        while True:
            shuffled = torch.randperm(len(prompts), generator=order).tolist()
            for start in range(0, len(shuffled), AT_ONCE):
                chosen = [prompts[index] for index in shuffled[start : start + AT_ONCE]]
                for messages in self._answered(chosen):
                    document = Document("self", messages=tuple(messages))
                    ids, _ = chat_tokens(document, self.tokenizer, assistant_only=False)
                    yield {"messages": messages}, len(ids)

    def pages(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Plain texts as rows, each with its tokens, without end."""
        before, after = document_affixes(self.tokenizer)
        start = before or [i for i in (self.tokenizer.eos_token_id,) if i is not None]
        if not start:
            raise DataError(
                "the tokenizer has neither a chat template nor BOS or EOS: nothing to begin with",
                where=f"{type(self.tokenizer).__name__}, --calibration self",
                fix="give text like the model's own: --calibration FILE",
            )
        while True:
            for ids in self._continued([start] * AT_ONCE, _PAGE):
                if (text := self._useful(ids)) is not None:
                    yield {"text": text}, len(before) + len(ids) + len(after)

    def _answered(self, prompts: Sequence[Sequence[str]]) -> Iterator[list[dict[str, str]]]:
        """Each prompt's chat, as far as its answers are of use."""
        chats: list[list[dict[str, str]]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        for turn in range(max(map(len, prompts))):
            asked = {
                index: [*chats[index], {"role": "user", "content": prompts[index][turn]}]
                for index in going
                if turn < len(prompts[index])
            }
            written = self._continued([self._rendered(chat) for chat in asked.values()], _ANSWER)
            going = []
            for (index, chat), ids in zip(asked.items(), written, strict=True):
                if (answer := self._useful(ids)) is not None:
                    chats[index] = [*chat, {"role": "assistant", "content": answer}]
                    going.append(index)
        yield from (chat for chat in chats if chat)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            found = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except REFUSALS as error:
            raise DataError(
                f"the chat template refuses a user's plain turn: {error}",
                where="chat template of the source, --calibration self",
                fix="give chats that it takes: --calibration FILE",
            ) from error
        ids: list[int] = found["input_ids"]
        return ids

    def _useful(self, ids: Sequence[int]) -> str | None:
        """The text of an answer, or None where it is empty or a loop."""
        text = decoded(self.tokenizer, ids, skip_special_tokens=True).strip()
        self._looked_at += 1
        if not text:
            self.text.empty += 1
        elif is_loop(ids):
            self.text.loops += 1
        else:
            self.text.unfinished += ids[-1] not in end_ids(self.model, self.tokenizer)
            return text
        dropped = self.text.empty + self.text.loops
        if self._looked_at >= _LOOKED_AT and self._looked_at - dropped < _USEFUL * self._looked_at:
            raise DataError(
                f"of {self._looked_at} texts that the model wrote {self.text.empty} are empty and "
                f"{self.text.loops} are loops",
                where="--calibration self",
                fix="give text like the model's own: --calibration FILE",
            )
        return None

    def _continued(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """What the model adds to each prompt."""
        return continued(
            self.model, self.tokenizer, prompts, new_tokens, temperature=self.text.temperature
        )


def end_ids(model: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end a model's text, by its own settings and its tokenizer."""
    stated = model.generation_config.eos_token_id
    ends = stated if isinstance(stated, list) else [stated]
    return sorted({i for i in (*ends, tokenizer.eos_token_id) if i is not None})


def continued(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float | None = None,
) -> list[list[int]]:
    """What a model adds to each prompt of a batch, up to and with the token that ends it.

    The checkpoint's settings of sampling count for nothing, but for the tokens that end a text.

    Args:
        model: a causal language model.
        tokenizer: its own.
        prompts: token ids; to one that leaves no room in the model's context nothing is added.
        new_tokens: at most.
        temperature: of sampling by torch's global generator; None takes the likeliest token.
    """
    from transformers import GenerationConfig

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    fitting = [
        index
        for index, ids in enumerate(prompts)
        if positions is None or len(ids) + _SHORTEST <= positions
    ]
    if not fitting:
        return [[] for _ in prompts]
    longest = max(len(prompts[index]) for index in fitting)
    room = new_tokens if positions is None else min(new_tokens, positions - longest)
    ends = end_ids(model, tokenizer)
    padding = ends[0] if ends else 0
    padded = [[padding] * (longest - len(prompts[i])) + [*prompts[i]] for i in fitting]
    mask = [[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in fitting]
    sampling = {} if temperature is None else {"temperature": temperature, "top_k": 0}
    settings = GenerationConfig(
        do_sample=temperature is not None,
        max_new_tokens=room,
        eos_token_id=ends or None,
        pad_token_id=padding,
        **sampling,
    )
    # Whatever is not set there would be taken from the checkpoint's own: top_p, penalties, ….
    own, model.generation_config = model.generation_config, settings
    try:
        found = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
        )
    finally:
        model.generation_config = own
    written: list[list[int]] = [[] for _ in prompts]
    for index, ids in zip(fitting, found[:, longest:].tolist(), strict=True):
        stop = next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))
        written[index] = ids[:stop]
    return written


def is_loop(ids: Sequence[int]) -> bool:
    """Whether a text repeats itself: fewer than half of its 4-grams are distinct."""
    grams = [tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1)]
    return len(grams) >= 2 * _GRAM and len(set(grams)) < _DISTINCT * len(grams)
