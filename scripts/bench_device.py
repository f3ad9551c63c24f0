"""Tokens per second of two exported packages on this Mac, such as Q-fold against repeat-kv.

    python scripts/bench_device.py qfold.mlpackage repeat-kv.mlpackage --tokenizer CKPT
    python scripts/bench_device.py A.mlpackage B.mlpackage --tokenizer CKPT --compute-units ALL

macOS 15 or later only: Core ML runs nowhere else, and the project's own checks, made on Linux,
have not run this script. Each of 30 prompts is fed through both packages, one after the other and
in turns, so that heat and other work meet both; then each decodes greedily. Only the decode steps
after the first are timed. The table gives medians over the prompts.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upcycle.program.noted import required_manifest
from upcycle.program.reading import read_graph

PROMPTS = [
    f"{opening} {topic}"
    for opening in ("Explain in simple words", "Write a short story about", "List five facts on")
    for topic in (
        "how a bridge carries weight.",
        "why the sky is blue.",
        "the history of bread.",
        "how bees find their way home.",
        "what a compiler does.",
        "the rings of Saturn.",
        "how to learn a language.",
        "the life of a river.",
        "why ice floats.",
        "how a piano makes its sound.",
    )
]
UNITS = ("ALL", "CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY")
MASKED = -4e4


@dataclass(frozen=True)
class Run:
    """One prompt through one package."""

    package: str
    prompt_tokens: int
    decoded: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.decoded / self.seconds


class Package:
    """A package with its cache in states, loaded by Core ML."""

    def __init__(self, path: Path, units: str) -> None:
        import coremltools as ct

        graph = read_graph(path)
        options = required_manifest(graph, path).options
        if options.document["kv_cache"] != "state" or "slidingMask" in graph.decode.inputs:
            sys.exit(f"{path}: this script decodes packages with --kv-cache state and one mask")
        self.name = str(path)
        self.context = options.context
        self.model = ct.models.MLModel(str(path), compute_units=getattr(ct.ComputeUnit, units))

    def run(self, prompt: list[int], tokens: int) -> Run:
        """Feed a prompt, then decode greedily and time all steps but the first."""
        import numpy as np

        state = self.model.make_state()
        mask = np.full((1, 1, 1, self.context), MASKED, dtype=np.float16)

        def step(token: int, position: int) -> int:
            mask[..., position] = 0
            inputs = {
                "inputIds": np.array([[token]], dtype=np.int32),
                "position": np.array([position], dtype=np.int32),
                "causalMask": mask,
            }
            return int(self.model.predict(inputs, state=state)["logits"].argmax())

        for position, token in enumerate(prompt):
            following = step(token, position)
        begin = len(prompt)
        following = step(following, begin)
        started = time.perf_counter()
        for position in range(begin + 1, begin + 1 + tokens):
            following = step(following, position)
        return Run(self.name, len(prompt), tokens, time.perf_counter() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs=2, type=Path, metavar="PACKAGE")
    parser.add_argument("--tokenizer", required=True, help="checkpoint folder of the tokenizer")
    parser.add_argument("--compute-units", choices=UNITS, default="CPU_AND_NE")
    parser.add_argument("--tokens", type=int, default=128, help="timed tokens per prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of 30 prompts")
    parser.add_argument("--json", type=Path, help="also write every run here")
    return parser.parse_args()


def check_machine() -> None:
    major = platform.mac_ver()[0].split(".")[0]
    if sys.platform != "darwin" or int(major) < 15:
        sys.exit(
            f"Core ML with states runs on macOS 15 or later; this is {platform.platform()}.\n"
            "The script was not run here. `upcycle graph` compares the bytes that two packages "
            "move,\nand `upcycle check-export` runs their programs, on any machine."
        )


def main() -> None:
    arguments = parse_arguments()
    check_machine()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    packages = [Package(path, arguments.compute_units) for path in arguments.packages]
    runs: list[Run] = []
    for number, text in enumerate(PROMPTS[: arguments.prompts]):
        prompt = tokenizer(text)["input_ids"]
        turns = packages if number % 2 == 0 else packages[::-1]
        for package in turns:
            if len(prompt) + 1 + arguments.tokens > package.context:
                sys.exit(f"{package.name}: {arguments.tokens} tokens do not fit its context")
            runs.append(package.run(prompt, arguments.tokens))
        print(f"prompt {number + 1} of {arguments.prompts}", file=sys.stderr)
    report(arguments, packages, runs)


def report(arguments: argparse.Namespace, packages: list[Package], runs: list[Run]) -> None:
    medians = {
        package.name: statistics.median(run.rate for run in runs if run.package == package.name)
        for package in packages
    }
    for name, rate in medians.items():
        print(f"{name}: {rate:,.2f} tok/s, median of {arguments.prompts} prompts")
    first, second = (medians[package.name] for package in packages)
    print(f"{packages[0].name} is {first / second:.2f} times as fast as {packages[1].name}")
    document: dict[str, Any] = {
        "machine": platform.machine(),
        "macos": platform.mac_ver()[0],
        "compute_units": arguments.compute_units,
        "median_tokens_per_second": medians,
        "ratio": first / second,
        "runs": [asdict(run) | {"tokens_per_second": run.rate} for run in runs],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
