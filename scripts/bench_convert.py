"""Hold the speed and memory of `upcycle convert` against `cp` and against the usual way.

    python scripts/bench_convert.py                 # about five minutes, 20 GB of disk
    python scripts/bench_convert.py --size 1GB      # a quick look; limits are for the full size
    python scripts/bench_convert.py --docs          # its table goes into docs/benchmarks.md

The source is generated: Llama-2-7B's shapes with fewer layers, bf16, 8 shards, in the page cache
when the clock starts. Each round times, one after the other on the same disk:

- `cp --reflink=never` of the output's bytes and a `sync` of the copy;
- the conversion itself, H = 32 to 8 by `mean`, fsync included, in a process that has its imports;
- the whole process, `upcycle convert`;
- the usual way: from_pretrained, average, save_pretrained, in a process that has its imports, and
  a `sync` of what it wrote, as for the others; its time before the sync is shown too.

Medians of the rounds are compared. Memory is taken of whole processes, also on sources of once,
twice and four times as many layers and shards. Exits with 1 where a limit is missed.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from marked import fill

from upcycle.byte_sizes import parse_bytes

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 4096, 11008, 32000, 32, 8
SHARDS = 8

GENERATE = """
import json, sys
from pathlib import Path
import torch
from upcycle.checkpoint.headers import TensorSpec
from upcycle.checkpoint.writer import shard_name, split_by_size
from upcycle.checkpoint.writer import ShardLayout, ShardWriter, tensor_chunks, write_index
folder, config, tensors, count = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
specs = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in tensors]
sizes = [spec.nbytes for spec in specs]
limit = sum(sizes) // count
while len(split_by_size(sizes, limit)) > count:
    limit += 1 << 20
parts = split_by_size(sizes, limit)
assert len(parts) == count, len(parts)
torch.manual_seed(0)
block = (torch.randn(1 << 24) * 0.02).bfloat16()
layouts = []
for i, part in enumerate(parts):
    layout = ShardLayout(shard_name(i, count), tuple(specs[part]), {"format": "pt"})
    writer = ShardWriter(folder, layout)
    for j, spec in enumerate(layout.tensors):
        rolled = block.roll(7919 * (64 * i + j))
        elements = spec.nbytes // 2
        data = rolled.repeat(-(-elements // len(rolled)))[:elements]
        writer.write(spec.name, tensor_chunks(data, "BF16"))
    writer.close()
    layouts.append(layout)
write_index(folder, layouts)
(folder / "config.json").write_text(json.dumps(config, indent=2))
"""
CONVERT = """
import sys, time
import upcycle.models.meta_loading
from upcycle.conversion.convert import convert
from upcycle.options.convert import ConvertOptions
begin = time.perf_counter()
convert(sys.argv[1], sys.argv[2], ConvertOptions(kv_heads=int(sys.argv[3])))
print(time.perf_counter() - begin)
"""
USUAL = """
import subprocess, sys, time
import torch
from transformers import AutoModelForCausalLM
source, output, kv_heads = sys.argv[1], sys.argv[2], int(sys.argv[3])
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
for layer in model.model.layers:
    for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        heads = linear.weight.data.view(kv_heads, -1, layer.self_attn.head_dim, linear.in_features)
        linear.weight = torch.nn.Parameter(heads.mean(1).flatten(0, 1))
model.config.num_key_value_heads = kv_heads
model.save_pretrained(output)
print(time.perf_counter() - begin)
subprocess.run(["sh", "-c", 'sync "$0"/* "$0"', output], check=True)
print(time.perf_counter() - begin)
"""
PLAN = """
import sys
from upcycle.cli import main
sys.argv = ["upcycle", "plan", sys.argv[1], "--kv-heads", sys.argv[2], "--quiet"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
print("torch" in sys.modules)
"""


@dataclass(frozen=True)
class Run:
    """One child process: its wall time in s, its peak RSS in bytes, and what it printed."""

    seconds: float
    peak: int
    output: str


@dataclass(frozen=True)
class Limit:
    """One line of the result."""

    what: str
    measured: float
    limit: float
    text: str

    @property
    def met(self) -> bool:
        """Whether the number is within its limit."""
        return self.measured <= self.limit


def child(*command: str | Path) -> Run:
    """Run a command to its end. This process stays small, or its RSS would count as the child's."""
    begin = time.perf_counter()
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with {process.returncode}")
    return Run(seconds, usage.ru_maxrss << 10, output)


def python(script: str, *arguments: str | Path) -> Run:
    """Run a script of this file in a fresh interpreter."""
    return child(sys.executable, "-c", script, *arguments)


def llama(layers: int) -> tuple[dict[str, object], list[tuple[str, list[int]]]]:
    """`config.json`, and every tensor's name and shape."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "tie_word_embeddings": False,
    }
    tensors = [("model.embed_tokens.weight", [VOCABULARY, HIDDEN])]
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors += [
            (f"{layer}.input_layernorm.weight", [HIDDEN]),
            (f"{layer}.mlp.down_proj.weight", [HIDDEN, INTERMEDIATE]),
            (f"{layer}.mlp.gate_proj.weight", [INTERMEDIATE, HIDDEN]),
            (f"{layer}.mlp.up_proj.weight", [INTERMEDIATE, HIDDEN]),
            (f"{layer}.post_attention_layernorm.weight", [HIDDEN]),
            *((f"{layer}.self_attn.{p}_proj.weight", [HIDDEN, HIDDEN]) for p in "koqv"),
        ]
    tensors += [("model.norm.weight", [HIDDEN]), ("lm_head.weight", [VOCABULARY, HIDDEN])]
    return config, tensors


def weight_bytes(layers: int) -> int:
    """Bytes of the source's tensors."""
    return sum(2 * shape[0] * [*shape, 1][1] for _, shape in llama(layers)[1])


def generate(folder: Path, layers: int, shards: int) -> Path:
    """Make a source."""
    folder.mkdir()
    config, tensors = llama(layers)
    python(GENERATE, folder, json.dumps(config), json.dumps(tensors), json.dumps(shards))
    os.sync()
    return folder


def read_into_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def fresh(folder: Path, *sources: Path) -> Path:
    """An output path that is free, with nothing waiting to be written and the sources cached."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    for source in sources:
        read_into_cache(source)
    return folder


def copy(source: Path, output: Path) -> float:
    """Seconds of `cp` and of `sync` on every file of the copy."""
    script = 'cp -r --reflink=never "$0" "$1" && sync "$1"/* "$1"'
    return child("sh", "-c", script, source, output).seconds


def bench(folder: Path, layers: int, rounds: int) -> list[Limit]:
    """Measure everything and compare it with the limits."""
    source = generate(folder / "source", layers, SHARDS)
    reference, output = folder / "reference", folder / "output"
    command = (sys.executable, "-m", "upcycle", "convert", source)
    options = ("--kv-heads", str(KV_HEADS), "--quiet")
    child(*command, reference, *options)
    copies, itself, whole, usual, unsynced = [], [], [], [], []
    peaks, usual_peaks = [], []
    for _ in range(rounds):
        copies.append(copy(reference, fresh(output, reference)))
        run = python(CONVERT, source, fresh(output, source), str(KV_HEADS))
        itself.append(float(run.output))
        run = child(*command, fresh(output, source), *options)
        whole.append(run.seconds)
        peaks.append(run.peak)
        run = python(USUAL, source, fresh(output, source), str(KV_HEADS))
        before, after = map(float, run.output.split())
        unsynced.append(before)
        usual.append(after)
        usual_peaks.append(run.peak)
        print(
            f"round: cp + sync {copies[-1]:.2f} s, conversion {itself[-1]:.2f} s, whole process "
            f"{whole[-1]:.2f} s, usual way + sync {usual[-1]:.2f} s "
            f"({unsynced[-1]:.2f} s before it)",
            flush=True,
        )
    plans = [
        child(sys.executable, "-m", "upcycle", "plan", source, *options).seconds for _ in "12345"
    ]
    torch_imported = python(PLAN, source, str(KV_HEADS)).output.strip() == "True"
    for path in (source, reference, output):
        shutil.rmtree(path)
    sizes = []
    for times in (1, 2, 4):
        part = generate(folder / f"source-{times}", times * -(-layers // 4), 2 * times)
        sizes.append(child(*command[:-1], part, folder / f"output-{times}", *options).peak)
        shutil.rmtree(part)
        shutil.rmtree(folder / f"output-{times}")
    peak = max(*peaks, *sizes)
    cp, ours = statistics.median(copies), statistics.median(itself)
    mib = [f"{number / 2**20:.0f}" for number in sizes]
    return [
        ratio("conversion itself / cp + sync", ours, cp, 1.3),
        ratio("whole process / cp + sync", statistics.median(whole), cp, 2),
        ratio(
            "conversion itself / usual way + sync", ours, statistics.median(usual), 1 / 3,
            f", {statistics.median(unsynced):.2f} s before the sync",
        ),
        Limit("peak RSS, MiB", peak / 2**20, 500e6 / 2**20, f"{peak / 1e6:.0f} MB"),
        Limit(
            "peak RSS, 4x / 1x layers and shards", sizes[-1] / sizes[0], 1.1,
            " -> ".join(mib) + " MiB",
        ),
        Limit(
            "peak RSS / usual way", peak / min(usual_peaks), 1 / 6,
            f"{peak / 2**20:.0f} / {min(usual_peaks) / 2**20:.0f} MiB",
        ),
        Limit("upcycle plan, s", statistics.median(plans), 1, f"{statistics.median(plans):.2f}"),
        Limit("upcycle plan imports torch", torch_imported, 0, str(torch_imported)),
    ]  # fmt: skip


def ratio(what: str, numerator: float, denominator: float, limit: float, note: str = "") -> Limit:
    """A quotient of two times in s."""
    text = f"{numerator:.2f} / {denominator:.2f} s{note}"
    return Limit(what, numerator / denominator, limit, text)


def markdown(limits: list[Limit], setting: str) -> str:
    """The result as a table with its provenance."""
    rows = ["| | measured | limit | |", "|---|--:|--:|---|"]
    rows += [
        f"| {limit.what} | {limit.measured:.3g} | {limit.limit:.3g} | {limit.text}"
        f"{'' if limit.met else ' (missed)'} |"
        for limit in limits
    ]
    return "\n".join([*rows, "", f"`python scripts/bench_convert.py`: {setting}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="4GB", help="the least size of the source")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    size = parse_bytes(arguments.size, where="--size")
    layers = 4
    while weight_bytes(layers) < size:
        layers += 1
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.processor(),
    )  # fmt: skip
    setting = (
        f"{weight_bytes(layers) / 1e9:.1f} GB of bf16 in {SHARDS} shards, {layers} layers, "
        f"H = {HEADS} -> {KV_HEADS}; {os.cpu_count()} cores, {cpu}, "
        f"Python {platform.python_version()}, {datetime.date.today().isoformat()}, "
        f"median of {arguments.rounds}"
    )
    print(setting)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-convert-") as folder:
        limits = bench(Path(folder), layers, arguments.rounds)
    print(f"{'':38}{'measured':>10}{'limit':>8}")
    for limit in limits:
        verdict = "ok" if limit.met else "FAILED"
        print(f"{limit.what:38}{limit.measured:>10.3g}{limit.limit:>8.3g}  {verdict:8}{limit.text}")
    if arguments.docs:
        fill("bench-convert", markdown(limits, setting))
    raise SystemExit(not all(limit.met for limit in limits))


if __name__ == "__main__":
    main()
