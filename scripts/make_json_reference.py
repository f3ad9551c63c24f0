"""Write docs/json.md: what each command prints under `--json`, as it printed it on the demo.

    python scripts/make_json_reference.py

Types are JSON's; an object whose keys are names (of tensors, files, roles, models) is shown by one
of them. What a figure means is said where its class is documented, in the module named.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo-source"
PAGE = ROOT / "docs" / "json.md"
RECIPE = """\
source: {source}
output: run
convert: {{kv_heads: 2}}
train:
  data: {{sources: [{text}]}}
  steps: 1
  sequence_length: 128
  batch_size: 2
  micro_batch_size: 2
  learning_rate: 1.0e-4
evaluate: {{max_tokens: 1000, new_tokens: 4, prompts: ["def main("]}}
"""
# Each command as it is run, and where its result is documented.
COMMANDS = {
    "inspect SRC": "upcycle.kvcache.inspection.Inspection",
    "plan SRC --kv-heads 2": "upcycle.planning.Plan",
    "predict SRC --calibration builtin --calibration-tokens 1024": "upcycle.conversion.predict",
    "sweep SRC --kv-heads 2 --max-tokens 500": "upcycle.evaluation.drift.DriftSweep",
    "capacity SRC --gpu-memory 1GiB --context 512": "upcycle.report.capacity_page",
    "convert SRC out --kv-heads 2": "upcycle.checkpoint.manifest.Manifest",
    "verify SRC out": "upcycle.checks.Check",
    "train recipe.yaml output=trained": "upcycle.training.result.TrainResult",
    "eval SRC out --out report --max-tokens 500": "upcycle.evaluation.results.Comparison",
    "export out model.mlpackage --context 64": "upcycle.options.export.ExportOptions",
    "graph model.mlpackage": "upcycle.program.description",
    "check-export out model.mlpackage --tokens 4": "upcycle.parity.results.ExportCheck",
    "run recipe.yaml": "upcycle.report.schema.ReportDocument",
    "doctor recipe.yaml": "upcycle.checks.Check",
    "init mine --source SRC": "upcycle.recipe.template",
    "recipe show recipe.yaml": "upcycle.recipe.schema.Recipe",
}
HEAD = """\
# What the commands print under `--json`

One JSON object on stdout, and nothing else there; `warnings` is added where something was warned
of. A number that is not finite is null. An error prints no JSON: three lines on stderr and the exit
code. `upcycle recipe schema` prints the schema of recipes. Made by
`python scripts/make_json_reference.py`, which ran each command on the demo's checkpoint: keys with
the type of their value, of an array its first item, of an object of names one of them.
"""
_DEPTH = 4
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def shape_of(value: Any, depth: int = 0) -> Any:
    """The keys of a JSON value with the types of theirs."""
    if isinstance(value, dict):
        if depth == _DEPTH:
            return "object"
        names = list(value)
        if len(names) > 1 and any(not name.isidentifier() for name in names):
            return {"<name>": shape_of(value[names[0]], depth + 1)}
        return {name: shape_of(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0], depth + 1)] if value else []
    return _KINDS[type(value)]


def printed(words: list[str], folder: Path) -> dict[str, Any]:
    """What a command prints."""
    command = [sys.executable, "-m", "upcycle", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{shlex.join(words)}: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> None:
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = ROOT / "recipes" / "demo-text" / "train.parquet"
        (folder / "recipe.yaml").write_text(RECIPE.format(source=DEMO, text=text))
        printed(["convert", str(DEMO), "trained/converted", "--kv-heads", "2"], folder)
        for command, home in COMMANDS.items():
            words = [str(DEMO) if word == "SRC" else word for word in shlex.split(command)]
            print(command, flush=True)
            shape = json.dumps(shape_of(printed(words, folder)), indent=1)
            name = words[0] if words[0] != "recipe" else "recipe show"
            parts.append(
                f"## {name}\n\n`upcycle {command} --json`; see `{home}`.\n\n```json\n{shape}\n```\n"
            )
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
