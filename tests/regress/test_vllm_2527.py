"""vllm-project/vllm#2527: InternLM2's `wqkv`, grouped `[q × n, k, v]`, comes out garbled.

Also OpenGVLab/InternVL#1267 and paiml/aprender#1686. transformers has no class of that name.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny import convert
from upcycle.errors import UpcycleError

CONFIG = {
    "model_type": "internlm2",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
AUTO_MAP = {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}


@pytest.mark.parametrize("extra", [{"auto_map": AUTO_MAP}, {}])
def test_a_layout_that_only_remote_code_knows_is_refused(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**CONFIG, **extra}))
    tensors = {"model.layers.0.attention.wqkv.weight": torch.zeros(96, 64)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UpcycleError, match="code") as caught:
        convert(source, tmp_path / "out", kv_heads=1)
    assert "class of transformers" in caught.value.fix
    assert not (tmp_path / "out").exists()
