"""Run every command of the README but the two of the clone, from a wheel in an empty environment.

    python scripts/try_readme.py            # builds the wheel and an environment in a new folder
    python scripts/try_readme.py --keep DIR # in DIR, which stays

What stands for the user's own in the README becomes the demo's: its checkpoint, text and recipe,
with fewer KV heads, steps and tokens, so that all of it takes minutes.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Words of the README, and the demo's in their place.
OWN = {
    "SRC": "recipes/demo-source",
    "TEXT": "recipes/demo-text/train.parquet",
    "DIR": "another-run",
    "RECIPE": "short.yaml",
    "8": "2",
    "8,4,1": "4,1",
    "8192": "512",
    "200": "2",
}
SHORT = {
    "upcycle run my-run/recipe.yaml": "train.steps=2 train.warmup_steps=0 train.batch_size=2 "
    "train.sequence_length=128 convert.refine=2 convert.calibration_tokens=2048",
    "upcycle recipe show short.yaml": "",
}
# What a table's commands need before them: a recipe of their own, and its conversion.
RECIPE = """\
source: recipes/demo-source
output: short
convert: {kv_heads: 2}
train:
  data: {sources: [recipes/demo-text/train.parquet]}
  steps: 2
  sequence_length: 128
  batch_size: 2
  micro_batch_size: 2
  learning_rate: 1.0e-4
evaluate: {max_tokens: 2000}
"""


def commands(readme: str) -> Iterator[list[str]]:
    """The words of each `upcycle` command: of the shell blocks first, then of the table."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    lines = [line.partition("#")[0] for line in blocks.splitlines()]
    cells = re.findall(r"^\| `(upcycle [^`]+)` \|", readme, re.MULTILINE)
    also = re.findall(r"`(upcycle (?:recipe|--)[^`]*)`", readme)
    found: set[str] = set()
    for line in [*lines, *cells, *also]:
        words = shlex.split(line)
        text = shlex.join(words)
        if words[:1] == ["upcycle"] and text not in found and "completion" not in text:
            found.add(text)
            yield words


def run(words: list[str], folder: Path) -> None:
    """Run a command; its exit code must be 0."""
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    shown = shlex.join([Path(words[0]).name, *words[1:]])
    print(f"{done.returncode:3}  {time.monotonic() - began:6.1f} s  {shown}", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def install(folder: Path) -> Path:
    """An environment with nothing but the wheel and what it needs; its `upcycle`."""
    run([sys.executable, "-m", "venv", "environment"], folder)
    pip = [str(folder / "environment" / "bin" / "pip"), "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", "dist", str(ROOT)], folder)
    (wheel,) = (folder / "dist").glob("upcycle-*.whl")
    run([*pip, "install", "--constraint", str(ROOT / "constraints.txt"), str(wheel)], folder)
    return folder / "environment" / "bin" / "upcycle"


def try_all(folder: Path) -> None:
    """Install, then run each command in a folder that holds nothing else."""
    upcycle = str(install(folder))
    work = folder / "work"
    work.mkdir()
    run([upcycle, "init", "recipes", "--demo"], work)
    (work / "short.yaml").write_text(RECIPE)
    count, converted = 0, set[str]()
    for words in commands((ROOT / "README.md").read_text()):
        count += 1
        name = words[1]
        if name == "convert":
            converted.add(f"out-{len(converted) + 1}")
        output = f"out-{max(len(converted), 1)}"
        given = [OWN.get(word, output if word == "OUT" else word) for word in words[1:]]
        if name == "train":
            run([upcycle, "convert", OWN["SRC"], "short/converted", "--kv-heads", "2"], work)
        more = SHORT.get(shlex.join(["upcycle", *given]), "")
        if "--calibration" in given:
            more += " --calibration-tokens 2048"
        run([upcycle, *given, *shlex.split(more)], work)
    print(f"{count} commands of README.md")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="the folder to work in, which stays")
    kept = parser.parse_args().keep
    if kept is not None:
        kept.mkdir(parents=True)
        try_all(kept.resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            try_all(Path(temporary))
