"""Export the shapes of EXAONE 4.0 1.2B in five ways, and hold memory and graph against limits.

    python scripts/bench_export.py           # some 15 minutes, 10.1 GB of memory, 8 GB of disk
    python scripts/bench_export.py --thin    # the same attention with hidden size 64

The checkpoint is made here with random fp16 weights. Each export runs in a process of its own,
whose peak resident memory is compared with the bytes of the weights. Exits with 1 where a limit is
missed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONTEXT = 4096
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "vocab_size": 102400,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 30,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
THIN = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512}
PEAK_LIMIT = 4  # times the fp16 weights
TILES = {"qfold": (0, 0), "repeat-kv": (60, 960 * 2**20)}

GENERATE = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
config = AutoConfig.for_model("exaone4", **json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
model.save_pretrained(sys.argv[1])
print(2 * sum(p.numel() for p in model.parameters()))
"""
EXPORT = """
import json, sys, time
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.program.counting import count_traffic
source, output, context, kv_cache, attention, *prefill = sys.argv[1:]
begin = time.perf_counter()
options = ExportOptions(
    context=int(context), prefill=64 if prefill else None, attention=attention, kv_cache=kv_cache
)
result = export_coreml(source, output, options)
function = result.function
tiles = [tile for each in result.functions.values() for tile in each.tiles]
past = [tile for tile in tiles if tile.of_kv and int(context) in tile.shape]
print(json.dumps({
    "operations": sum(function.histogram.values()),
    "tiles": len(past),
    "tile_bytes": sum(tile.nbytes for tile in past),
    "copies": count_traffic(function).copies,
    "concat": function.histogram["concat"],
    "seconds": time.perf_counter() - begin,
}))
"""


def child(script: str, *arguments: str | Path) -> tuple[Any, int]:
    """What a script printed last, as JSON, and the peak resident bytes of its process."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}")
    return json.loads(output.splitlines()[-1]), usage.ru_maxrss << 10


def bench(folder: Path, *, thin: bool, ways: list[str]) -> list[str]:
    """Export in all ways, print a row for each, and return what missed its limit."""
    source = folder / "source"
    weights, _ = child(GENERATE, source, json.dumps({**SHAPE, **(THIN if thin else {})}))
    print(f"{weights / 1e9:.3f} GB of fp16 weights, context {CONTEXT}")
    print(
        f"{'':21}{'peak GB':>8}{'/weights':>9}{'ops':>7}{'concat':>7}{'tiles':>6}{'tile MiB':>9}"
        f"{'copies MiB':>11}{'s':>6}"
    )
    missed = []
    operations = {}
    for way in ways:
        made = folder / "made"
        made.mkdir()
        output = made / "out.mlpackage"
        result, peak = child(EXPORT, source, output, str(CONTEXT), *way.split("/"))
        shutil.rmtree(made)
        operations[way] = result["operations"]
        print(
            f"{way:21}{peak / 1e9:8.2f}{peak / weights:9.2f}{result['operations']:7}"
            f"{result['concat']:7}{result['tiles']:6}{result['tile_bytes'] / 2**20:9.1f}"
            f"{result['copies'] / 2**20:11.1f}{result['seconds']:6.0f}",
            flush=True,
        )
        if not thin and peak > PEAK_LIMIT * weights:
            missed.append(f"{way}: peak memory beyond {PEAK_LIMIT} x the weights")
        expected = TILES[way.split("/")[1]]
        if (result["tiles"], result["tile_bytes"]) != expected:
            missed.append(f"{way}: tiles other than {expected}")
    # Not of repeat-kv, which must repeat the new K and V apart from the past.
    both = [operations.get(f"{kv_cache}/qfold") for kv_cache in ("read-only", "state")]
    if None not in both and not both[0] < both[1]:
        missed.append("the read-only graph has no fewer operations than that with states")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = [f"{kv_cache}/{way}" for kv_cache in ("state", "read-only") for way in TILES]
    ways.append("state/qfold/prefill")
    parser.add_argument("--thin", action="store_true", help="hidden size 64; no limit of memory")
    parser.add_argument(
        "--only", nargs="+", choices=ways, default=ways, metavar="KV-CACHE/ATTENTION[/prefill]"
    )
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-export-") as folder:
        missed = bench(Path(folder), thin=arguments.thin, ways=arguments.only)
    for line in missed:
        print("FAILED", line)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
