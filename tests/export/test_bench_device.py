"""The bench for a Mac: its loop over a stand-in for Core ML, and its refusal anywhere else."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_device.py"
CONTEXT = 64


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Successor:
    """A model whose next token is always the last one plus one; it notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def make_state(self) -> str:
        return "state"

    def predict(self, inputs: dict[str, Any], state: str) -> dict[str, Any]:
        assert state == "state"
        token, position = int(inputs["inputIds"][0, 0]), int(inputs["position"][0])
        seen = np.flatnonzero(inputs["causalMask"] == 0)
        assert seen.tolist() == list(range(position + 1))
        self.calls.append((token, position, len(seen)))
        logits = np.zeros((1, 1, 300), dtype=np.float16)
        logits[..., token + 1] = 1
        return {"logits": logits}


def test_a_prompt_is_fed_and_then_continued(bench: ModuleType) -> None:
    package = bench.Package.__new__(bench.Package)
    package.name, package.context, package.model = "a", CONTEXT, Successor()
    run = package.run([7, 9, 30], tokens=5)
    assert (run.prompt_tokens, run.decoded) == (3, 5)
    assert run.rate == 5 / run.seconds
    tokens = [7, 9, 30, 31, 32, 33, 34, 35, 36]
    assert package.model.calls == [(token, i, i + 1) for i, token in enumerate(tokens)]


def test_there_are_30_prompts(bench: ModuleType) -> None:
    assert len(set(bench.PROMPTS)) == 30


@pytest.mark.parametrize(("system", "release"), [("linux", ""), ("darwin", "14.7"), ("win32", "")])
def test_other_systems_are_told_so(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, release: str
) -> None:
    monkeypatch.setattr(bench.sys, "platform", system)
    monkeypatch.setattr(bench.platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    with pytest.raises(SystemExit, match=r"(?s)macOS 15 or later.*was not run here"):
        bench.check_machine()
