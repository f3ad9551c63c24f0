"""Updates vanish in bf16 weights (meta-pytorch/torchtune#2254, mosaicml/llm-foundry PR #1734).

transformers loads a bf16 checkpoint in bf16, and at a usual rate most weights then never move. Here
the masters are fp32 whatever the checkpoint stores.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.training.runs import tiny_run


def test_a_bf16_checkpoint_moves_and_is_stored_in_bf16(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, dtype=torch.bfloat16)
    result = run.train(steps=5, learning_rate=1e-5, warmup_steps=0, precision="bf16")
    # Bytes that the text lacks have no row of the embedding that moves.
    assert result.masters_moved > 0.8
    assert result.stored_moved < 0.5
    manifest = json.loads((result.output / "upcycle.json").read_text())
    assert manifest["result"]["masters_moved"] == result.masters_moved
    stored = load_file(result.output / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    masters = load_file(tmp_path / "out-training" / "step-5" / "weights.safetensors")
    moments = load_file(tmp_path / "out-training" / "step-5" / "moments.safetensors")
    assert {tensor.dtype for tensor in [*masters.values(), *moments.values()]} == {torch.float32}
