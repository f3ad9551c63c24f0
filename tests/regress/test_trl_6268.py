"""huggingface/trl#6268: DeepSeek-V3 configs with fewer KV heads, which MLA never reads."""

from typing import Any

import pytest

from upcycle.errors import FamilyError
from upcycle.families import shape_of


@pytest.mark.parametrize("keys", [{}, {"kv_lora_rank": 32}])
def test_latent_attention_is_refused_although_kv_heads_are_given(keys: dict[str, Any]) -> None:
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **keys,
    }
    with pytest.raises(FamilyError, match=r"MLA caches one compressed latent.* no KV heads"):
        shape_of(config)
