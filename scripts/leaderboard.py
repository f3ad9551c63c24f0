"""Method x KV heads x refinement: what each conversion costs, on text that it has not seen.

    python scripts/leaderboard.py demo                    # about half an hour on two cores
    python scripts/leaderboard.py smollm2 --device cuda   # an hour and more on two cores
    python scripts/leaderboard.py scrambled               # nine scrambled heads back to three
    python scripts/leaderboard.py FOLDER --calibration TEXT --heldout TEXT --kv-heads 8 4

The rows go to `recipes/leaderboard/<name>.json`, with a plot beside it; for the first three also
into docs/benchmarks.md. Conversions are commands of their own, timed with all that they do, on one
seed of calibration text; the refined ones on three.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from make_english_text import write_parts
from marked import fill
from measure_demo import cpu_name
from safetensors.torch import save_file

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.sidecars import copy_sidecars
from upcycle.conversion.convert import convert
from upcycle.evaluation.compare import evaluate
from upcycle.families import family_in
from upcycle.heads.gauge import scramble
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "recipes" / "leaderboard"
NAMED = ("demo", "smollm2", "scrambled")


@dataclass(frozen=True)
class Contest:
    """What is converted, and on which texts.

    Attributes:
        source: the checkpoint.
        calibration: what is measured on.
        heldout: what judges; nothing else may have seen it.
        kv_heads: the numbers to convert to.
    """

    source: Path
    calibration: str
    heldout: Path | None
    kv_heads: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One conversion.

    Attributes:
        kv_heads: g.
        options: of the command.
        seed: of the calibration text.
        nll: nats per held-out token.
        kl: mean KL from the source, nats per token.
        top1: how often the likeliest token is the source's.
        closed: share of the loss of `mean` that is not lost.
        seconds: of the command.
        peak_mib: its largest resident memory.
    """

    kv_heads: int
    options: str
    seed: int
    nll: float
    kl: float
    top1: float
    closed: float
    seconds: float
    peak_mib: int


def variants(contest: Contest, args: argparse.Namespace) -> Iterator[tuple[list[str], int]]:
    """The options of each conversion, and its seed."""
    text = ["--calibration", contest.calibration, "--calibration-tokens", str(args.tokens)]
    yield ["--method", "mean"], 0
    yield ["--method", "procrustes", *text], 0
    yield ["--method", "lowrank", *text], 0
    yield ["--method", "lowrank", "--grouping", "search", *text], 0
    if args.refine:
        for seed in range(args.seeds):
            yield ["--method", "lowrank", "--refine", str(args.refine), *text], seed


# Runs a command from a small process, whose memory would otherwise count as the command's.
LAUNCH = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
print(json.dumps([time.perf_counter() - begin, usage.ru_maxrss >> 10]))
"""


def measure(contest: Contest, options: list[str], out: Path, device: str) -> tuple[float, int]:
    """Convert in a process of its own: its seconds and its peak memory in MiB."""
    command = [sys.executable, "-m", "upcycle", "convert", str(contest.source), str(out)]
    command += [*options, "--device", device, "--quiet"]
    launch = [sys.executable, "-c", LAUNCH, *command]
    done = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def run(contest: Contest, args: argparse.Namespace) -> tuple[float, list[Row]]:
    """The source's loss and all rows."""
    rows: list[Row] = []
    text = (contest.heldout,) if contest.heldout else ()
    with tempfile.TemporaryDirectory() as folder:
        for kv_heads in contest.kv_heads:
            lost_by_mean = 0.0
            for options, seed in variants(contest, args):
                out = Path(folder) / f"{len(rows)}"
                chosen = ["--kv-heads", str(kv_heads), "--seed", str(seed), *options]
                seconds, peak = measure(contest, chosen, out, args.device)
                asked = EvaluateOptions(
                    text=text, max_tokens=args.heldout_tokens, device=args.device
                )
                source, found = evaluate(contest.source, [out], asked).models
                assert found.divergence is not None
                lost = found.nll - source.nll
                lost_by_mean = lost_by_mean or lost
                shown = " ".join(o for o in options if o not in ("--method", contest.calibration))
                shown = shown.split(" --calibration")[0]
                rows.append(
                    Row(
                        kv_heads,
                        shown,
                        seed,
                        found.nll,
                        found.divergence.kl.mean,
                        found.divergence.top1_agreement,
                        1 - lost / lost_by_mean,
                        seconds,
                        peak,
                    )
                )
                print(rows[-1], flush=True)
    return source.nll, rows


def scrambled(source: Path, folder: Path) -> Path:
    """SmolLM2 with nine KV heads whose order and gauges are random: the same function, as fp32."""
    convert(source, folder / "raised", ConvertOptions(kv_heads=9))
    checkpoint = Checkpoint.open(folder / "raised")
    family = family_in(checkpoint)
    shape = family.shape(checkpoint.config)
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    generator = torch.Generator().manual_seed(0)
    for layer in shape.attention_layers:
        names = family.tensor_names(layer, shape)
        weights = family.read({role: tensors[name].double() for role, name in names.items()}, shape)
        changed = family.write(scramble(weights, generator))
        tensors |= {names[role]: tensor.float() for role, tensor in changed.items()}
    out = folder / "scrambled"
    out.mkdir()
    copy_sidecars(checkpoint, out)
    config = {**checkpoint.config, "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    return out


def table(document: dict) -> str:
    """The rows as Markdown with their provenance; refined rows as the mean of their seeds."""
    lines = [
        "| KV heads | method | NLL | KL | top-1 | gap closed | seconds | peak MiB |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups: dict[tuple[int, str], list[dict]] = {}
    for row in document["rows"]:
        groups.setdefault((row["kv_heads"], row["options"]), []).append(row)
    for (kv_heads, options), rows in groups.items():
        mean = {key: sum(r[key] for r in rows) / len(rows) for key in rows[0] if key != "options"}
        spread = max(r["closed"] for r in rows) - min(r["closed"] for r in rows)
        closed = f"{mean['closed']:.1%}" + (f" (spread {spread:.1%})" if len(rows) > 1 else "")
        lines.append(
            f"| {kv_heads} | {options.replace('--', '')} | {mean['nll']:.4f} | {mean['kl']:.4f} "
            f"| {mean['top1']:.1%} | {closed} | {mean['seconds']:.0f} | {mean['peak_mib']:.0f} |"
        )
    provenance = (
        f"Source: NLL {document['source_nll']:.4f}. {document['tokens']:,} calibration tokens, "
        f"{document['heldout_tokens']:,} held out at most. `{document['command']}`, measured "
        f"{document['measured']}, {document['machine']}."
    )
    return "\n".join([*lines, "", provenance])


def plot(document: dict, path: Path) -> None:
    """The share of the gap that each method closes, in groups by the number of KV heads."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "upcycle", "font.size": 9})
    from matplotlib import pyplot

    heads = list(dict.fromkeys(row["kv_heads"] for row in document["rows"]))
    methods = [m for m in dict.fromkeys(row["options"] for row in document["rows"]) if m != "mean"]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        closed = []
        for kv_heads in heads:
            found = [
                r for r in document["rows"] if (r["kv_heads"], r["options"]) == (kv_heads, method)
            ]
            closed.append(100 * sum(row["closed"] for row in found) / len(found))
        places = [place + index * width for place in range(len(heads))]
        bars = axes.bar(places, closed, width, label=method.replace("--", ""))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    centre = 0.4 - width / 2
    axes.set_xticks([place + centre for place in range(len(heads))], [str(h) for h in heads])
    axes.set(xlabel="KV heads", ylabel="gap of mean pooling closed, %", ylim=(0, 112))
    figure.legend(ncols=4, fontsize=8, loc="outside upper center", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def machine(device: str) -> str:
    """What the rows were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}"


def contest_of(args: argparse.Namespace, folder: Path) -> Contest:
    """The named contest, or the folder's own."""
    if args.name == "demo":
        text = str(ROOT / "recipes" / "demo-text" / "train.parquet")
        return Contest(ROOT / "recipes" / "demo-source", text, None, (4, 2, 1))
    if args.name in ("smollm2", "scrambled"):
        source = args.source or ROOT / ".cache" / "smollm2"
        if not source.exists():
            script = ROOT / "scripts" / "make_smollm2.py"
            subprocess.run([sys.executable, script, source], check=True)
        parts = write_parts(folder / "english")
        if args.name == "scrambled":
            source = scrambled(source, folder)
        heads = (1,) if args.name == "smollm2" else (3,)
        return Contest(source, str(parts["calibration"]), parts["heldout"], heads)
    if not (args.calibration and args.heldout and args.kv_heads):
        sys.exit("a folder needs --calibration, --heldout and --kv-heads")
    return Contest(Path(args.name), args.calibration, args.heldout, tuple(args.kv_heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="demo, smollm2, scrambled, or a checkpoint folder")
    parser.add_argument("--source", type=Path, help="SmolLM2's folder, if it is elsewhere")
    parser.add_argument("--calibration")
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--kv-heads", type=int, nargs="*")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--heldout-tokens", type=int, default=16_000)
    parser.add_argument("--refine", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of the refined conversions")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.name == "scrambled":
        args.refine, args.tokens = 0, min(args.tokens, 8192)  # the exact way back needs no more
    with tempfile.TemporaryDirectory() as folder:
        source_nll, rows = run(contest_of(args, Path(folder)), args)
    name = Path(args.name).name
    document = {
        "command": f"python scripts/leaderboard.py {args.name} --tokens {args.tokens}"
        f" --refine {args.refine} --seeds {args.seeds} --heldout-tokens {args.heldout_tokens}",
        "measured": datetime.date.today().isoformat(),
        "machine": machine(args.device),
        "tokens": args.tokens,
        "heldout_tokens": args.heldout_tokens,
        "source_nll": source_nll,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(document, RESULTS / f"{name}.svg")
    print(table(document))
    if args.name in NAMED:
        fill(f"leaderboard-{name}", table(document))


if __name__ == "__main__":
    main()
