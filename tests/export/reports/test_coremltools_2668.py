"""apple/coremltools#2668, #2560, #2468: operations of transformers' masks that do not convert.

`PyTorch convert function for op 'new_ones' not implemented`, `'diff'`, `__ior__` and `bitwise_or`
all come from the masks that transformers builds; with a ready 4-D mask none of them is traced.
"""

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.loading import load_decoder
from upcycle.export.quiet import quiet_tracing
from upcycle.options.export import ExportOptions

UNCONVERTIBLE = {"aten::diff", "aten::new_ones", "aten::__ior__", "aten::bitwise_or"}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "cohere2"])
def test_no_mask_is_built_in_the_trace(tmp_path: Path, model_type: str) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source", model_type))
    decoder = load_decoder(source, ExportOptions(context=64, attention="qfold", kv_cache="state"))
    with quiet_tracing(), torch.no_grad():
        traced = torch.jit.trace(decoder, decoder.example_inputs(1), check_trace=False)  # type: ignore[no-untyped-call]
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "aten::softmax" in kinds
    assert not UNCONVERTIBLE & kinds
