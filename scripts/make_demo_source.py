"""Train the demo source: a small, real multi-head-attention Llama, from text every Python has.

    python scripts/make_demo_source.py                 # about an hour on two cores
    python scripts/make_demo_source.py --resume        # continue after an interruption

The corpus is the standard library's own sources (tests and codec tables left out). Files are
split into train, held-out and calibration by a hash of their path, so no text is in two splits.
Needs exactly the CPython whose file hashes are in `corpus.json`; `--new-corpus` starts another.

Writes the checkpoint and its model card to `recipes/demo-source`, the training split, its file list
and the curve to `recipes/demo-text`, and the two texts that the package ships to `upcycle/texts`.
"""

import argparse
import hashlib
import json
import math
import platform
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = ROOT / "recipes" / "demo-source"
CORPUS_DIR = ROOT / "recipes" / "demo-text"
TEXTS_DIR = ROOT / "upcycle" / "texts"

SKIPPED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
SPLITS = ("train", "held-out", "calibration")
HELD_OUT_BYTES = 500_000
CALIBRATION_BYTES = 300_000
LARGEST_SPLIT_FILE = 60_000  # one huge file must not be a whole split

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 512
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
EVALUATE_EVERY = 250


def corpus_files(library: Path) -> list[dict]:
    """Every source file of the standard library with size, SHA-256 and split, by path."""
    rows = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        data = path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(data).hexdigest()
        rows.append({"path": relative.as_posix(), "bytes": len(data), "sha256": digest})
    assign_splits(rows)
    return rows


def assign_splits(rows: list[dict]) -> None:
    """Fill held-out, then calibration, in the order of the hash of the path; the rest trains."""
    budgets = [("held-out", HELD_OUT_BYTES), ("calibration", CALIBRATION_BYTES)]
    for row in rows:
        row["split"] = "train"
    shuffled = sorted(rows, key=lambda row: hashlib.sha256(row["path"].encode()).hexdigest())
    for row in shuffled:
        if not budgets:
            break
        if not 500 <= row["bytes"] <= LARGEST_SPLIT_FILE:
            continue
        split, left = budgets[0]
        row["split"] = split
        left -= row["bytes"]
        budgets = [(split, left), *budgets[1:]] if left > 0 else budgets[1:]


def load_corpus(library: Path, corpus_path: Path, new_corpus: bool) -> list[dict]:
    """The committed file list, after proving that this Python has the very same files."""
    if new_corpus or not corpus_path.exists():
        rows = corpus_files(library)
        document = {"python": platform.python_version(), "files": rows}
        corpus_path.write_text(json.dumps(document, indent=1) + "\n")
        return rows
    document = json.loads(corpus_path.read_text())
    for row in document["files"]:
        path = library / row["path"]
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"
        if found != row["sha256"]:
            sys.exit(
                f"error: {path} is not the file of CPython {document['python']} "
                f"(SHA-256 {found})\n  run with that Python, or pass --new-corpus"
            )
    return document["files"]


def read_split(library: Path, rows: list[dict], split: str) -> list[tuple[str, str]]:
    return [
        (row["path"], (library / row["path"]).read_text("utf-8"))
        for row in rows
        if row["split"] == split
    ]


def write_jsonl(path: Path, documents: list[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, text in documents:
            file.write(json.dumps({"source": f"Lib/{name}", "text": text}) + "\n")


def write_parquet(path: Path, documents: list[tuple[str, str]]) -> None:
    columns = {
        "source": [f"Lib/{name}" for name, _ in documents],
        "text": [t for _, t in documents],
    }
    pq.write_table(pa.table(columns), path, compression="zstd", compression_level=19)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training split alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def tokenise(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All documents in one row of ids, each led by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
    return torch.tensor(ids)


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.rope_theta = config.rope_parameters["rope_theta"]  # for engines that read it here alone
    return LlamaForCausalLM(config)


def batch_at(tokens: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """[batch, length + 1] random crops: a pure function of (seed, step), so resume is exact."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - SEQUENCE_LENGTH - 1, (BATCH_SIZE,), generator=generator)
    return torch.stack([tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])


def learning_rate(step: int, steps: int) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction
    )


@torch.no_grad()
def held_out(
    model: LlamaForCausalLM, tokens: torch.Tensor, num_bytes: int, stride: int = 1
) -> tuple[float, float]:
    """(nats per token, bits per byte) over every `stride`-th disjoint window."""
    rows = tokens[: (len(tokens) - 1) // SEQUENCE_LENGTH * SEQUENCE_LENGTH + 1]
    windows = rows.unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)[::stride]
    model.eval()
    total = sum(loss_of(model, part, "sum").item() for part in windows.split(16))
    model.train()
    nats = total / (windows.shape[0] * SEQUENCE_LENGTH)
    return nats, nats * len(tokens) / num_bytes / math.log(2)


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0},
        ],
        lr=PEAK_LEARNING_RATE,
        betas=(0.9, 0.95),
        fused=True,
    )


def train(
    model: LlamaForCausalLM,
    train_ids: torch.Tensor,
    held_out_ids: torch.Tensor,
    held_out_bytes: int,
    arguments: argparse.Namespace,
) -> list[dict]:
    optimizer = optimizer_of(model)
    curve: list[dict] = []
    first_step = 0
    state_path = arguments.state
    if arguments.resume and state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        curve, first_step = state["curve"], state["step"]
    started = time.perf_counter()
    for step in range(first_step, arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps)
        loss = loss_of(model, batch_at(train_ids, step, arguments.seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % EVALUATE_EVERY == 0 or done == arguments.steps:
            nats, bits = held_out(model, held_out_ids, held_out_bytes, stride=4)
            row = {"step": done, "train_nats": loss.item(), "nats": nats, "bits_per_byte": bits}
            curve.append(row)
            rate = (done - first_step) * BATCH_SIZE * SEQUENCE_LENGTH
            rate /= time.perf_counter() - started
            print(json.dumps({**row, "tokens_per_second": round(rate)}), flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "curve": curve, "step": done}, state_path)
    return curve


CARD_HEAD = """---
license: psf-2.0
tags: [multi-head-attention, demo]
---
# The demo source

A multi-head-attention Llama that exists to be converted: the source of the demo, the tests and the
benchmarks of upcycle. It models Python code and is good for nothing else.

| | |
|---|---|
"""
CARD_FOOT = """
Made by `scripts/make_demo_source.py`. The list of files with SHA-256 (`corpus.json`), the training
split (`train.parquet`) and the curve (`curve.jsonl`) are in `recipes/demo-text`.
"""


def write_card(facts: dict[str, str]) -> None:
    rows = "".join(f"| {name} | {text} |\n" for name, text in facts.items())
    (MODEL_DIR / "README.md").write_text(CARD_HEAD + rows + CARD_FOOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "demo-source.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--new-corpus", action="store_true")
    arguments = parser.parse_args()
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    for folder in (MODEL_DIR, CORPUS_DIR, TEXTS_DIR):
        folder.mkdir(parents=True, exist_ok=True)

    library = arguments.library
    rows = load_corpus(library, CORPUS_DIR / "corpus.json", arguments.new_corpus)
    splits = {name: read_split(library, rows, name) for name in SPLITS}
    write_jsonl(TEXTS_DIR / "heldout.jsonl", splits["held-out"])
    write_jsonl(TEXTS_DIR / "calibration.jsonl", splits["calibration"])
    write_parquet(CORPUS_DIR / "train.parquet", splits["train"])
    for folder in (CORPUS_DIR, TEXTS_DIR):
        shutil.copyfile(library / "LICENSE.txt", folder / "LICENSE-PYTHON.txt")

    texts = {name: [text for _, text in documents] for name, documents in splits.items()}
    num_bytes = {name: sum(len(t.encode()) for t in part) for name, part in texts.items()}
    tokenizer = train_tokenizer(texts["train"])
    train_ids = tokenise(tokenizer, texts["train"])
    held_out_ids = tokenise(tokenizer, texts["held-out"])
    print(f"train {len(train_ids):,} tokens, held out {len(held_out_ids):,}", flush=True)

    model = new_model(arguments.seed)
    curve = train(model, train_ids, held_out_ids, num_bytes["held-out"], arguments)

    model.half().float()  # the figure on the card is the stored weights' own
    nats, bits = held_out(model, held_out_ids, num_bytes["held-out"])
    before = ([row for row in curve if row["step"] <= 0.9 * arguments.steps] or curve)[-1]
    model.half().save_pretrained(MODEL_DIR)
    (MODEL_DIR / "model.safetensors").chmod(0o644)  # the library writes 0600
    tokenizer.save_pretrained(MODEL_DIR)
    curve_text = "".join(json.dumps(row) + "\n" for row in curve)
    (CORPUS_DIR / "curve.jsonl").write_text(curve_text)
    tokens = arguments.steps * BATCH_SIZE * SEQUENCE_LENGTH
    gain = before["bits_per_byte"] - curve[-1]["bits_per_byte"]
    write_card(
        {
            "Architecture": f"Llama, {sum(p.numel() for p in model.parameters()):,} parameters, "
            "4 layers, 8 heads of 32, tied embeddings, stored as fp16",
            "Data": f"the standard library of CPython {platform.python_version()} without tests "
            f"and codec tables: {len(texts['train'])} files, {num_bytes['train']:,} bytes, "
            f"{len(train_ids):,} tokens",
            "Licence of the data": "Python Software Foundation License 2.0",
            "Tokenizer": f"byte-level BPE, {VOCAB_SIZE} entries, trained on the training split; "
            f"{num_bytes['held-out'] / len(held_out_ids):.2f} bytes per held-out token",
            "Steps": f"{arguments.steps:,} of {BATCH_SIZE} sequences of {SEQUENCE_LENGTH}: "
            f"{tokens:,} tokens, {tokens / len(train_ids):.1f} passes over the data",
            "Optimiser": f"AdamW, peak {PEAK_LEARNING_RATE:g}, cosine to 0, weight decay "
            f"{WEIGHT_DECAY:g}, bf16 compute, fp32 masters, seed {arguments.seed}",
            "Held-out loss": f"**{nats:.4f} nats per token, {bits:.4f} bits per byte** "
            f"({len(texts['held-out'])} files, {num_bytes['held-out']:,} bytes, disjoint windows "
            f"of {SEQUENCE_LENGTH}; the stored fp16 weights)",
            "Gain of the last tenth of the steps": f"{gain:.4f} bits per byte",
        }
    )
    print(f"held out: {nats:.4f} nats per token, {bits:.4f} bits per byte")


if __name__ == "__main__":
    main()
