"""Run the demo recipes and commit what they gave: figures for the pages and the recipes.

    python scripts/measure_demo.py            # both recipes, about ten minutes on two cores

Each recipe's comparison goes to `recipes/<name>.result.json`, without its generations, and its
table into the pages between the markers of that name. The first recipe's figures are also drawn,
as `docs/demo.svg`.
"""

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from demo_picture import picture
from marked import fill

from upcycle.pipeline import run
from upcycle.recipe.loading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("demo", "demo-5pct")


def measure(name: str) -> dict[str, Any]:
    """The result of one recipe, as it is committed."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    command = f"upcycle run recipes/{name}.yaml"
    result = run(recipe, command=command, announce=lambda stage, skipped: print(name, stage))
    report = result.report.to_dict()
    comparison = report["comparison"]
    models = [
        {
            "label": model["label"],
            "num_key_value_heads": model["num_key_value_heads"],
            "nll": model["nll"],
            "bits_per_byte": model["bits_per_byte"],
            "divergence": model["divergence"],
            "kv_bytes_per_token": model["kv_cache"]["bytes_per_token"],
        }
        for model in comparison["models"]
    ]
    training = report["training"]
    return {
        "command": command,
        "measured": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}",
        "steps": training["steps"],
        "tokens": training["tokens"],
        "scored_tokens": comparison["text"]["tokens"],
        "models": models,
        "export": report["export"],
    }


def cpu_name() -> str:
    """What the kernel calls the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(result: dict[str, Any]) -> str:
    """A Markdown table with its provenance."""
    rows = ["| | KV heads | NLL | KL(source) mean | top-1 agreement | KV bytes/token |"]
    rows.append("|---|--:|--:|--:|--:|--:|")
    for model in result["models"]:
        divergence = model["divergence"]
        kl = f"{divergence['kl']['mean']:.4f}" if divergence else "0"
        top1 = f"{divergence['top1_agreement']:.2%}" if divergence else "100 %"
        rows.append(
            f"| {model['label']} | {model['num_key_value_heads']} | {model['nll']:.4f} | {kl} "
            f"| {top1} | {model['kv_bytes_per_token']:,} |"
        )
    rows.append("")
    rows.append(
        f"`{result['command']}`: {result['steps']} steps, {result['tokens']:,} tokens of "
        f"distillation; {result['scored_tokens']:,} held-out tokens, nats per token. "
        f"Measured {result['measured']}, {result['machine']}."
    )
    return "\n".join(rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in RECIPES:
        result = measure(name)
        path = ROOT / "recipes" / f"{name}.result.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        fill(name, table(result))
        print(table(result))
        if name == "demo":
            (ROOT / "docs" / "demo.svg").write_text(picture(result), encoding="utf-8")


if __name__ == "__main__":
    main()
