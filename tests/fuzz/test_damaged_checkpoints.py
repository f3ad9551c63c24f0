"""Damaged checkpoints: refused in three lines, or converted rightly; never a crash or a hang."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fuzz.damage import DAMAGES, INDEX
from tests.tiny import tiny_checkpoint
from upcycle.cli.app import main

SECONDS = 30  # for one conversion that takes less than 0.1


@dataclass(frozen=True)
class Run:
    """What a command did."""

    code: int
    errors: str


class Hang(BaseException):
    """Not an Exception, so that nobody takes it for one of theirs."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A single file and a sharded one."""
    folder = tmp_path_factory.mktemp("fuzz")
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32,
    }  # fmt: skip
    return [
        tiny_checkpoint(folder / name, max_shard_size=size, **sizes)
        for name, size in (("single", "5GB"), ("sharded", "3KB"))
    ]


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def upcycle(*arguments: object) -> Run:
    """The command line, in this process."""
    errors, before = io.StringIO(), sys.argv
    sys.argv = ["upcycle", *map(str, arguments)]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        return Run(int(end.code or 0), errors.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("main() always exits")


def fault(run: Run, source: Path, output: Path) -> str | None:
    """What is wrong with how a damaged checkpoint was answered."""
    if run.code == 0:
        return differs(source, output)
    if run.code != 2:
        return f"exit code {run.code}: {run.errors}"
    if not re.fullmatch(r"error: .+\n  where: .+\n  fix: .+\n", run.errors):
        return f"not three lines: {run.errors}"
    if sorted(os.listdir(output.parent)) != [source.name]:
        return f"left behind: {os.listdir(output.parent)}"
    return None


def differs(source: Path, output: Path) -> str | None:
    """How an output differs from the mean of what is on disk, read by the library."""
    config, made = (json.loads((f / "config.json").read_text()) for f in (source, output))
    config.pop("auto_map", None)  # the output is transformers' own class
    if {**config, "num_key_value_heads": 2} != made:
        return f"config.json became {made}"
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    before, after = tensors_of(source), tensors_of(output)
    if before.keys() != after.keys():
        return f"other tensors: {before.keys() ^ after.keys()}"
    for name, tensor in before.items():
        expected = tensor
        if re.search(r"self_attn\.[kv]_proj\.", name) and heads > 2:
            rows = tensor.double().unflatten(0, (2, heads // 2, tensor.shape[0] // heads))
            expected = rows.mean(1).flatten(0, 1).to(tensor.dtype)
        elif re.search(r"self_attn\.[kv]_proj\.", name) and heads == 1:
            expected = torch.cat([tensor, tensor])
        found = after[name]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return f"{name} became {found.dtype} {found.shape}"
        if not torch.equal(as_bytes(found), as_bytes(expected)):
            return f"{name} has other values"
    return None


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / INDEX
    shards = {"model.safetensors"}
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
    return {name: t for shard in shards for name, t in load_file(folder / shard).items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(sources: list[Path], seeds: range, folder: Path) -> Counter[int]:
    """Damage, convert and judge once for each seed; the exit codes that were seen."""
    codes: Counter[int] = Counter()
    faults = []
    for seed in seeds:
        rng = random.Random(seed)
        place = folder / str(seed)
        source, output = place / "source", place / "output"
        shutil.copytree(rng.choice(sources), source)
        damage = DAMAGES[seed % len(DAMAGES)]
        damage(rng, source)
        try:
            with at_most(SECONDS):
                run = upcycle("convert", source, output, "--kv-heads", 2)
            wrong = fault(run, source, output)
            codes[run.code] += 1
        except Hang:
            wrong = "it hangs"
        if wrong:
            faults.append(f"seed {seed}, {damage.__name__}: {wrong}")
        else:
            shutil.rmtree(place)
    assert not faults, "\n".join(faults)
    return codes


def test_a_sound_checkpoint_is_converted(sources: list[Path], tmp_path: Path) -> None:
    for source in sources:
        output = tmp_path / source.name / "output"
        output.parent.mkdir()
        run = upcycle("convert", source, output, "--kv-heads", 2)
        assert (run.code, fault(run, source, output)) == (0, None)


def test_a_few_damaged_checkpoints(sources: list[Path], tmp_path: Path) -> None:
    codes = check(sources, range(48), tmp_path)
    assert codes[2] >= 30


@pytest.mark.slow
def test_damaged_checkpoints(sources: list[Path], tmp_path: Path) -> None:
    codes = check(sources, range(1000, 2000), tmp_path)
    assert codes[2] >= 500
    assert set(codes) == {0, 2}
