"""How many chats a converted model still answers as its rules want, of those that its source does.

    python scripts/chat_survival.py SOURCE MODEL [MODEL ...]

Greedy answers to the two turns of `chat_prompts.py`, every model going on from its own first
answer. A chat passes when both answers are there, are no loop and keep all rules. Printed for each
model: the share of the source's passing chats that pass too, with its 95 % Wilson interval.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from chat_prompts import Turn, chats

from upcycle.models.loading import choose_device, load_model, load_tokenizer
from upcycle.models.sampling import continued, is_loop

BATCH = 20


def main() -> None:
    """Run all models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write all answers there, as JSON lines")
    args = parser.parse_args()
    place = choose_device(args.device)
    passed: dict[Path, list[bool]] = {}
    kinds = [kind for kind, _ in chats()]
    lines = []
    for folder in (args.source, *args.models):
        model = load_model(folder, dtype=torch.float32, device=place)
        found = answers(model, load_tokenizer(args.source), args.new_tokens)
        passed[folder] = [not any(broken) for _, broken in found]
        for kind, (texts, broken) in zip(kinds, found, strict=True):
            row = {"model": str(folder), "kind": kind, "answers": texts, "broken": broken}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if args.out:
        args.out.write_text("".join(lines), encoding="utf-8")
    own = passed[args.source]
    of_kind = Counter(kind for kind, ok in zip(kinds, own, strict=True) if ok)
    print(f"{args.source}: {sum(own)} of {len(own)} pass ({dict(of_kind)})")
    for folder in args.models:
        both = [kind for kind, a, b in zip(kinds, own, passed[folder], strict=True) if a and b]
        low, high = wilson(len(both), sum(own))
        print(
            f"{folder}: {len(both)} of these {sum(own)} pass: {len(both) / max(1, sum(own)):.2f} "
            f"({low:.2f} to {high:.2f}; {dict(Counter(both))})"
        )


def answers(model: Any, tokenizer: Any, new_tokens: int) -> list[tuple[list[str], list[str]]]:
    """Each chat's two answers, and the rules that they break."""
    found = []
    asked = [turns for _, turns in chats()]
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        messages: list[list[dict[str, str]]] = [[] for _ in batch]
        broken: list[list[str]] = [[] for _ in batch]
        for turn in range(2):
            for chat, turns in zip(messages, batch, strict=True):
                chat.append({"role": "user", "content": turns[turn].text})
            prompts = [
                tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=True, return_dict=True
                )["input_ids"]
                for chat in messages
            ]
            written = continued(model, tokenizer, prompts, new_tokens)
            for chat, problems, turns, ids in zip(messages, broken, batch, written, strict=True):
                text = tokenizer.decode(ids, skip_special_tokens=True).strip()
                chat.append({"role": "assistant", "content": text})
                problems += [
                    f"turn {turn + 1}: {name}" for name in problems_of(text, ids, turns[turn])
                ]
        for chat, problems in zip(messages, broken, strict=True):
            found.append(([m["content"] for m in chat if m["role"] == "assistant"], problems))
    return found


def problems_of(text: str, ids: list[int], turn: Turn) -> list[str]:
    """The rules that an answer breaks."""
    if not text:
        return ["empty"]
    names = [name for name, holds in turn.rules.items() if not holds(text)]
    return [*names, *(["loop"] if is_loop(ids) else [])]


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    z, share = 1.959964, hits / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


if __name__ == "__main__":
    main()
