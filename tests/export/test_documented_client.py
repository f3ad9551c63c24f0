"""The Python client of docs/core-ml.md, with this project's interpreter in the place of Core ML."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_checkpoint
from upcycle.export.coreml import export_coreml
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.program.reading import read_graph

CONTEXT = 64


class MLModel:
    """What the client calls of coremltools' class of this name."""

    def __init__(
        self, package: str, *, compute_units: str = "ALL", function_name: str = "main"
    ) -> None:
        graph = read_graph(package)
        self.user_defined_metadata = graph.metadata
        self._loaded, self._function = Loaded(graph), function_name

    def make_state(self) -> Interpreter:
        return Interpreter(self._loaded, half=False)

    def predict(
        self, inputs: Mapping[str, NDArray[Any]], *, state: Interpreter
    ) -> dict[str, NDArray[Any]]:
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return {key: out.numpy() for key, out in state.run(self._function, tensors).items()}


def client() -> str:
    page = Path(__file__).parents[2] / "docs" / "core-ml.md"
    (code,) = re.findall(r"```python\n(import json.*?)```", page.read_text(encoding="utf-8"), re.S)
    return code


@pytest.mark.parametrize("prefill", [None, 4])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [("llama", {}), ("gemma2", {"sliding_window": 8})],
)
def test_it_decodes_as_transformers_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_type: str,
    config: dict[str, Any],
    prefill: int | None,
) -> None:
    source = tiny_checkpoint(tmp_path / "source", model_type, **config)
    monkeypatch.chdir(tmp_path)
    export_coreml(source, "model.mlpackage", ExportOptions(context=CONTEXT, prefill=prefill))
    fake = SimpleNamespace(
        models=SimpleNamespace(MLModel=MLModel), ComputeUnit=SimpleNamespace(CPU_AND_NE="NE")
    )
    monkeypatch.setitem(sys.modules, "coremltools", fake)
    capsys.readouterr()
    exec(client(), {})
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    answer = model.generate(prompt, max_length=CONTEXT + 1, do_sample=False)[0, prompt.shape[1] :]
    expected = [token for token in answer.tolist() if token != tokenizer.eos_token_id]
    assert len(expected) > 4
    assert capsys.readouterr().out == tokenizer.decode(expected[: CONTEXT - prompt.shape[1]]) + "\n"
