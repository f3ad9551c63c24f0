"""Time and memory of a calibrated conversion, in forward passes over its calibration tokens.

    python scripts/bench_calibrated.py            # about ten minutes, 10 GB of disk
    python scripts/bench_calibrated.py --tokens 32768    # what `convert` takes; about an hour
    python scripts/bench_calibrated.py --docs     # its table goes into docs/benchmarks.md

The source is that of `bench_convert.py`: Llama-2-7B's shapes with fewer layers, 4.2 GB of bf16. The
forward pass is transformers' own, in fp32 as in the calibration, over the same tokens, without the
head and with the weights loaded; the conversions are commands of their own, timed with all that
they do. The weights are random, so nothing is said of quality here. Exits with 1 where the
conversion without refinement takes more memory than its limit.
"""

import argparse
import datetime
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import bench_convert
from bench_convert import HEADS, KV_HEADS, SHARDS, Limit, child, generate, python, weight_bytes
from marked import fill
from measure_demo import cpu_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LIMIT = 3e9  # bytes of resident memory, for the conversion without refinement
LEAST = 4e9  # bytes of weights
FORWARD = """
import sys, time
import torch
from transformers import AutoModel
from upcycle.checkpoint.reader import Checkpoint
from upcycle.models.calibration_text import calibration_rows
source, tokens = sys.argv[1], int(sys.argv[2])
rows = calibration_rows(
    Checkpoint.open(source), ["builtin"], tokens=tokens, sequence_length=512, seed=0
)
model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
begin = time.perf_counter()
with torch.no_grad():
    for part in rows.split(4):
        model(input_ids=part, use_cache=False)
print(time.perf_counter() - begin)
"""


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes: the calibration text must become some tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def bench(folder: Path, layers: int, tokens: int, refine: int) -> tuple[list[str], Limit]:
    """The rows of the table, and the memory of the conversion without refinement."""
    source = generate(folder / "source", layers, SHARDS)
    save_tokenizer(source)
    options = [*["--kv-heads", str(KV_HEADS), "--calibration", "builtin", "--quiet"]]
    options += ["--calibration-tokens", str(tokens), "--device", "cpu"]
    runs = {}
    for steps in [0, refine] if refine else [0]:
        command = (sys.executable, "-m", "upcycle", "convert", source, folder / "output")
        what = f"`lowrank`, `--refine {steps}`" if steps else "`lowrank`"
        run = runs[what] = child(*command, *options, "--refine", str(steps))
        shutil.rmtree(folder / "output")
        print(f"{what}: {run.seconds:.1f} s, peak RSS {run.peak / 1e9:.2f} GB", flush=True)
    forward = python(FORWARD, source, str(tokens))
    seconds = float(forward.output)
    rows = [row("one forward pass, whole model in memory", seconds, seconds, forward.peak)]
    rows += [row(what, run.seconds, seconds, run.peak) for what, run in runs.items()]
    peak = runs["`lowrank`"].peak
    return rows, Limit("peak RSS, GB", peak / 1e9, LIMIT / 1e9, f"{peak / 1e6:.0f} MB")


def row(what: str, seconds: float, forward: float, peak: int) -> str:
    """A row of the table."""
    return f"| {what} | {seconds:.1f} s | {seconds / forward:.2f} | {peak / 1e9:.2f} GB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--refine", type=int, default=0, help="also with so many steps")
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    layers = 4
    while weight_bytes(layers) < LEAST:
        layers += 1
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-calibrated-") as folder:
        rows, memory = bench(Path(folder), layers, args.tokens, args.refine)
    setting = (
        f"`python scripts/bench_calibrated.py --tokens {args.tokens} --refine {args.refine}`: "
        f"{weight_bytes(layers) / 1e9:.1f} GB of bf16, {layers} layers of width "
        f"{bench_convert.HIDDEN:,}, H = {HEADS} -> {KV_HEADS}, {args.tokens:,} tokens; "
        f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}, "
        f"{datetime.date.today().isoformat()}."
    )
    head = ["| | time | forward passes | peak RSS |", "|---|--:|--:|--:|"]
    lines = [*head, *rows, "", setting]
    print("\n".join(lines))
    verdict = "ok" if memory.met else "FAILED"
    print(f"{memory.what} {memory.measured:.2f}, limit {memory.limit:.2f}: {verdict}")
    if args.docs:
        fill("bench-calibrated", "\n".join(lines))
    raise SystemExit(not memory.met)


if __name__ == "__main__":
    main()
